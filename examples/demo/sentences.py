"""The sentences that the demo embeds: eight subjects, from short to long."""

from __future__ import annotations

SENTENCES: tuple[str, ...] = (
    # Short ones.
    "The cat sleeps.",
    "Rain is coming.",
    "She plays the violin.",
    "Bread needs yeast.",
    "Our train was late.",
    "The doctor called back.",
    "Prices went up again.",
    "He scored twice.",
    # A clause more.
    "A kitten is dozing on the warm windowsill.",
    "Dark clouds gather over the hills this evening.",
    "The orchestra tuned its instruments before the concert.",
    "Knead the dough until it is smooth and elastic.",
    "The express to the coast leaves from platform nine.",
    "A nurse took his temperature and wrote it down.",
    "Inflation eats up what people have saved.",
    "The goalkeeper stopped a penalty in the last minute.",
    # Longer ones.
    "Stray dogs and cats find a home in the shelter that volunteers built behind the old mill.",
    "The forecast warns of storms along the coast, with gusts strong enough to bring down trees.",
    "Her first album mixes folk songs of the north with the slow rhythms of a jazz trio.",
    "Roast the tomatoes with garlic and thyme, then blend them with stock into a thick soup.",
    "Because of works on the line, passengers have to change to a bus between the two stations.",
    "The new vaccine protects nine out of ten patients against the disease for at least a year.",
    "The central bank raised its interest rate by a quarter of a point to slow down lending.",
    "After ninety minutes without a goal the final was decided by a shot from the corner flag.",
    # Long ones.
    "Owls hunt at night: their feathers make hardly a sound, and their ears, one set higher than"
    " the other, tell them to within a degree where a mouse moves under the snow.",
    "A low over the sea draws moist air against the mountains, where it rises, cools and drops"
    " as rain for days, while the valleys on the other side stay dry and unusually warm.",
    "The composer wrote the quartet in three weeks, threw away the slow movement on the evening"
    " before the first performance, and had the players improvise on a theme of four notes.",
    "A sourdough starter is nothing but flour and water in which wild yeasts and bacteria live"
    " together; fed once a day, it raises a loaf without any yeast from the shop.",
    "The night train crosses two borders and a mountain range; travellers who fall asleep beside"
    " the harbour wake up among vineyards, and have breakfast before the capital comes in sight.",
    "In a trial with four thousand patients the tablets lowered blood pressure as well as the"
    " older drug did, but fewer people had to stop taking them because of a cough.",
    "Shares fell on Monday when the largest lender of the country told investors that a third of"
    " its loans to builders may not be paid back, and the currency lost two percent by noon.",
    "Nobody expected the promoted club to survive its first season, yet by spring it had beaten"
    " all of the favourites at home and needed one point from two matches to win the league.",
)
"""In rising length, so that each batch of eight has a length of its own."""
