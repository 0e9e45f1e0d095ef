"""Programs that use lenz as its users do."""
