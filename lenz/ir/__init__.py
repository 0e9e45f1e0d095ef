"""The intermediate representations: data only, no passes."""
