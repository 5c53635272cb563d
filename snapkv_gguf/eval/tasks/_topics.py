"""Words by topic, for sentences to classify. No word stands under two topics."""

from __future__ import annotations

_TEXT = """
astronomy: comet, telescope, galaxy, eclipse, planet, nebula, orbit, meteor, supernova, observatory, asteroid, moon
baking: flour, dough, oven, yeast, muffin, rolling pin, frosting, bread, pastry, cinnamon roll, cake, biscuit
banking: loan, mortgage, deposit, savings account, interest rate, teller, credit card, overdraft, cheque, vault, bond, debt
boats: sail, anchor, rudder, mast, canoe, harbour, ferry, keel, lifeboat, yacht, oar, captain
birds: sparrow, nest, feather, owl, eagle, heron, beak, robin, swallow, woodpecker, seagull, egg
carpentry: saw, plank, chisel, workbench, dovetail joint, nail, sandpaper, sawdust, varnish, clamp, plywood, hammer
chess: bishop, checkmate, pawn, opening, endgame, rook, chessboard, gambit, castling, stalemate, queen sacrifice, grandmaster
clothing: jacket, scarf, trousers, button, sweater, sock, raincoat, skirt, glove, zipper, collar, shirt
computers: keyboard, laptop, software, processor, password, hard disk, compiler, screen, network cable, database, printer, server
education: teacher, homework, classroom, exam, pupil, lecture, diploma, textbook, blackboard, timetable, school, essay
farming: tractor, harvest, barn, plough, cow, hay bale, fertilizer, wheat field, scarecrow, shepherd, pasture, dairy
film: camera crew, director, trailer, screenplay, actor, premiere, cinema, sequel, stuntman, film script, close-up, documentary
football: goalkeeper, penalty, referee, corner kick, striker, offside rule, stadium, halftime, midfielder, free kick, league, trophy
gardening: rose bush, compost, flower bed, hedge, watering can, tulip, greenhouse, weed, lawn, seedling, shovel, orchard
geology: volcano, fossil, granite, earthquake, sediment, mineral, limestone, tectonic plate, lava, crystal, crater, erosion
justice: judge, courtroom, lawyer, verdict, jury, witness, prison, appeal, trial, sentence, defendant, evidence
medicine: nurse, vaccine, surgeon, prescription, hospital, thermometer, bandage, fever, patient, ambulance, diagnosis, clinic
music: violin, melody, orchestra, drum, choir, symphony, trumpet, concert, guitar, chord, conductor, piano
painting: easel, brush, canvas, portrait, watercolour, palette, sketch, gallery, landscape, mural, pigment, frame
politics: election, parliament, senator, ballot, campaign, minister, coalition, treaty, president, vote, referendum, embassy
railways: locomotive, platform, railway station, signal box, carriage, timber sleeper, train driver, freight train, buffer stop, track, tunnel, ticket inspector
swimming: pool, diving board, goggles, backstroke, lifeguard, butterfly stroke, lane rope, snorkel, towel, swimsuit, flipper, crawl
travel: suitcase, passport, hotel, airport, map, souvenir, guidebook, visa, itinerary, backpack, boarding pass, tourist
weather: thunderstorm, rainbow, fog, hurricane, snowfall, drizzle, heatwave, cloud, forecast, breeze, hailstone, frost
"""  # noqa: E501

TOPICS: dict[str, tuple[str, ...]] = {
    line.split(": ")[0]: tuple(line.split(": ")[1].split(", ")) for line in _TEXT.strip().splitlines()
}
