"""Words that fill the blanks of the prompts: topics, people, places, things, languages."""

from __future__ import annotations


def items(text: str) -> list[str]:
    """The entries of a list that semicolons separate."""
    return [" ".join(item.split()) for item in text.split(";") if item.strip()]


TOPICS = items("""
    photosynthesis; the French Revolution; black holes; compound interest; the water cycle; sourdough bread;
    machine learning; the immune system; plate tectonics; the stock market; electric cars; solar panels; the Roman
    Empire; jazz music; chess openings; the human heart; vaccines; antibiotics; coral reefs; volcanoes; the Great
    Depression; supply and demand; inflation; quantum computing; relativity; gravity; DNA; natural selection; the
    Silk Road; Buddhism; the Renaissance; World War I; the Cold War; the Industrial Revolution; democracy; the
    United Nations; climate change; renewable energy; nuclear power; recycling; deforestation; ocean currents;
    earthquakes; hurricanes; the seasons; the Moon landing; Mars; the solar system; telescopes; satellites; GPS;
    the internet; search engines; encryption; blockchain; databases; operating systems; compilers; recursion;
    sorting algorithms; hash tables; binary search; neural networks; computer vision; robotics; 3D printing;
    self-driving cars; smartphones; batteries; semiconductors; LED lights; refrigerators; airplanes; bridges;
    skyscrapers; concrete; steel; plastic; cotton; coffee; tea; chocolate; olive oil; cheese; fermentation;
    vegetarian cooking; knife skills; baking; meal planning; nutrition; protein; vitamins; sleep; stress;
    meditation; yoga; running a marathon; strength training; stretching; back pain; headaches; allergies; diabetes;
    blood pressure; first aid; mental health; therapy; habits; time management; public speaking; negotiation;
    leadership; remote work; job interviews; resumes; cover letters; salary negotiation; freelancing; startups;
    marketing; branding; customer service; accounting; taxes; budgeting; saving for retirement; credit scores;
    mortgages; renting an apartment; insurance; gardening; houseplants; composting; beekeeping; bird watching;
    dogs; cats; goldfish; horses; elephants; whales; octopuses; spiders; bees; butterflies; dinosaurs; fossils;
    mushrooms; trees; deserts; rainforests; rivers; mountains; glaciers; lakes; clouds; thunderstorms; rainbows;
    snow; photography; painting; sculpture; architecture; typography; graphic design; film making; acting; the
    violin; the piano; guitar chords; songwriting; poetry; short stories; novels; Shakespeare; Greek myths; Norse
    myths; fairy tales; folklore; philosophy; ethics; logic; Stoicism; existentialism; psychology; memory; learning
    a language; grammar; punctuation; essay writing; note taking; reading faster; speed reading; mathematics;
    algebra; geometry; calculus; probability; statistics; prime numbers; fractions; percentages; the Pythagorean
    theorem; graphs; matrices; number systems; physics; optics; magnetism; electricity; sound; heat; friction;
    energy; chemistry; the periodic table; acids and bases; chemical reactions; rust; soap; water; air pressure;
    buoyancy; biology; cells; bacteria; viruses; evolution; genetics; ecosystems; food chains; pollination; soil;
    farming; irrigation; rice; wheat; maps; time zones; calendars; the metric system; money; banks; trade; tourism;
    museums; libraries; schools; homework; exams; universities; scholarships; football; basketball; tennis;
    swimming; cycling; hiking; camping; fishing; sailing; skiing; surfing; board games; video games; puzzles; magic
    tricks; knitting; sewing; woodworking; home repair; plumbing; painting a room; cleaning; laundry; moving house;
    packing; travel insurance; visas; airports; trains; buses; bicycles; traffic; parking; pets; babies; toddlers;
    teenagers; parenting; weddings; birthdays; funerals; holidays; New Year; Halloween; Thanksgiving; Diwali;
    Ramadan; Christmas; friendship; dating; marriage; divorce; loneliness; grief; happiness; courage; honesty;
    kindness; patience; procrastination; motivation; creativity; curiosity; failure; success; ambition; retirement
""")
PLACES = items("""
    Paris; Tokyo; New York; London; Berlin; Rome; Madrid; Lisbon; Vienna; Prague; Budapest; Istanbul; Cairo;
    Nairobi; Cape Town; Lagos; Mumbai; Delhi; Bangkok; Hanoi; Singapore; Seoul; Beijing; Shanghai; Sydney;
    Melbourne; Auckland; Toronto; Vancouver; Montreal; Chicago; Boston; Seattle; San Francisco; Los Angeles;
    Denver; Austin; Miami; Mexico City; Havana; Lima; Bogotá; Buenos Aires; Santiago; Rio de Janeiro; Dublin;
    Edinburgh; Oslo; Stockholm; Copenhagen; Helsinki; Reykjavik; Amsterdam; Brussels; Zurich; Geneva; Milan;
    Venice; Florence; Naples; Athens; Warsaw; Krakow; Kyoto; Osaka; Marrakesh; Tunis; Accra; Dakar; Bali; Nepal;
    Iceland; Portugal; Norway; Peru; Vietnam; Morocco; Greece; New Zealand
""")
NAMES = items("""
    Anna; Ben; Carla; David; Elena; Farid; Grace; Hassan; Ingrid; James; Keiko; Liam; Maria; Noah; Olivia; Pedro;
    Quinn; Rosa; Samir; Tara; Umar; Vera; Wei; Ximena; Yusuf; Zoe; Amir; Bella; Chen; Dmitri; Emma; Felix; Gita;
    Hugo; Isla; Jonas; Kofi; Leila; Marco; Nina; Omar; Priya; Rafael; Sofia; Tom; Ursula; Victor; Wendy; Yara; Mr.
    Okafor; Mrs. Lindqvist; Dr. Patel; Ms. Ramirez; Professor Tanaka; Jack Morrison; Sarah Whitfield; Daniel Novak;
    Aisha Bello; Lucas Meyer; Hannah Fischer; Miguel Torres; Emily Carter; Ahmed Mansour; Julia Kowalska; Peter
    Lang; Nadia Haddad; Kevin O'Brien
""")
SURNAMES = items("""
    Becker; Novak; Silva; Moreau; Haddad; Jensen; Kowalski; Rossi; Tanaka; Okafor; Lindgren; Patel; Murphy; Garcia;
    Schmidt; Popescu; Nguyen; Kim; Cohen; Ivanova; Petrov; Larsen; Dubois; Costa; Weber; Marino; Fernandez;
    Nakamura; Osei; Byrne
""")
COMPANIES = items("""
    Northwind Logistics; Bluebird Bakery; Harbor Street Books; Alder & Finch; Lumen Software; Greenleaf Gardens;
    Summit Outdoor; Riverside Clinic; Oakwood Furniture; Pixel Forge; Cedar Bank; Sunrise Solar; Maple Dental;
    Orchid Hotels; Tidal Wave Sports; Copper Kettle Coffee; Brightpath Tutoring; Falcon Couriers; Meadow Dairy;
    Quartz Analytics; Redwood Insurance; Silver Spoon Catering; Starling Airlines; Ironbridge Tools; Lakeside
    Veterinary; Nimbus Cloud Services
""")
OBJECTS = items("""
    lamp; backpack; water bottle; bicycle; laptop; phone case; notebook; desk chair; coffee maker; umbrella; winter
    jacket; running shoes; headphones; keyboard; camera; tent; sleeping bag; frying pan; toaster; vacuum cleaner;
    watch; guitar; sofa; mirror; carpet; candle; blender; suitcase; pillow; board game; telescope; drone; printer;
    monitor; garden hose
""")
FOODS = items("""
    rice; eggs; spinach; chicken; lentils; potatoes; tomatoes; pasta; chickpeas; salmon; tofu; mushrooms; carrots;
    onions; cheese; bread; beans; avocado; sweet potatoes; broccoli; shrimp; ground beef; yogurt; oats; bananas;
    apples; peanut butter; coconut milk; curry paste; tortillas; corn; peppers; zucchini; garlic; ginger; noodles;
    cabbage; pumpkin; tuna; quinoa
""")
LANGUAGES = items("""
    French; Spanish; German; Italian; Portuguese; French; Spanish; German; Dutch; Japanese; Chinese; Russian;
    Polish; Swedish; Turkish; Arabic; Hindi; Korean; Greek; Latin
""")
PROGRAMMING = items("""
    Python; Python; Python; Python; JavaScript; JavaScript; Java; C; C++; TypeScript; SQL; Bash; Go; Rust; HTML and
    CSS; Ruby; PHP; R; Kotlin; Swift; C#
""")
AUDIENCES = items("""
    a five year old; a ten year old; a high school student; a complete beginner; my grandmother; a busy manager; a
    college student; someone who hates math; a new employee; my little brother; a non-native speaker; an engineer;
    a tourist
""")
TONES = items("""
    friendly; formal; funny; polite; professional; casual; dramatic; encouraging; sarcastic; simple; poetic;
    confident; apologetic; enthusiastic; serious; warm; neutral; firm but polite
""")
ROLES = items("""
    a pirate; a medieval knight; a grumpy librarian; a detective in 1920s London; a wise old wizard; a sports
    coach; a French chef; a space explorer; a museum guide; a job interviewer; a talking cat; a robot who wants to
    be human; a strict math teacher; a travel agent; a doctor explaining things calmly; a salesperson; a history
    professor; a poet; a farmer; a spaceship computer; a news anchor; a ghost; a dragon; a barista; a personal
    trainer; a lawyer; a kindergarten teacher
""")
THINGS_TO_WRITE = items("""
    a short story; a poem; a haiku; a limerick; a blog post; an email; a speech; a dialogue; a product description;
    a news article; a song; a letter; a diary entry; a review; a short essay; a scene from a play; a fable; a
    bedtime story; a tweet; an advertisement; a LinkedIn post; a fairy tale; a monologue; an introduction
    paragraph; a conclusion; a toast
""")
SITUATIONS = items("""
    I lost my wallet on the bus; my neighbor plays loud music at night; I can't sleep before exams; my boss gave my
    project to someone else; my best friend stopped answering my messages; I want to quit my job but I'm scared; my
    laptop is very slow; my plant has yellow leaves; I have a job interview tomorrow; I forgot my mom's birthday;
    my roommate never cleans; I feel tired all the time; I spilled coffee on my keyboard; my flight got cancelled;
    I'm moving to a new city; I just adopted a puppy; I burned the dinner; my kid refuses to eat vegetables; I have
    to give a speech at a wedding; I got a bad grade; my car makes a strange noise; I'm learning to drive; I spend
    too much money on takeout; I'm bored at home; I want to start running; I have an argument with my sister; my
    phone battery dies quickly; I'm nervous about a first date; I can't focus when working from home; I want to
    read more books; my internet is down; I need to lose some weight; I keep procrastinating; I found a stray cat;
    I'm having trouble making friends; my landlord won't fix the heating; I broke a window at work
""")
WISHES = items("""
    learn to cook; learn Python; learn Spanish; save money; get fit; sleep better; plan a birthday party; organize
    my closet; write a novel; start a podcast; build a website; grow tomatoes; train my dog; prepare for a
    marathon; make new friends; improve my handwriting; learn the guitar; eat healthier; wake up earlier; study for
    finals; plan a road trip; buy a used car; start a small business; clean the house quickly; paint my bedroom;
    reduce my screen time; get better at chess; learn to draw; fix a flat tire; write a resume; negotiate a raise;
    pack for a trip; host a dinner; read more; meditate
""")
FUNCTIONS = items("""
    checks whether a string is a palindrome; reverses a linked list; computes the nth Fibonacci number; counts the
    words in a file; removes duplicates from a list while keeping the order; merges two sorted lists; finds the
    second largest number in a list; checks whether a number is prime; converts Celsius to Fahrenheit; sorts a list
    of dictionaries by a key; flattens a nested list; counts how often each character occurs in a string; validates
    an email address; generates a random password; reads a CSV file and returns the rows as dictionaries; finds all
    pairs that sum to a target; computes the factorial of a number; rotates a list by k places; transposes a
    matrix; multiplies two matrices; finds the longest common prefix of a list of strings; implements binary
    search; implements bubble sort; implements quicksort; implements a stack; implements a queue using two stacks;
    checks whether brackets are balanced; converts a Roman numeral to an integer; converts an integer to binary;
    finds the longest word in a sentence; capitalizes the first letter of every word; groups words by their first
    letter; finds the median of a list; computes the greatest common divisor; prints a multiplication table;
    simulates rolling two dice; counts vowels in a string; computes compound interest; parses a date in the format
    YYYY-MM-DD; finds files with a given extension in a folder; retries a function up to three times; caches the
    results of a function; downloads a web page and prints its title; splits a list into chunks of size n; finds
    the missing number in a list from 1 to n; checks whether two strings are anagrams; computes the running average
    of a list; draws a triangle of stars; inserts a node into a binary tree; traverses a tree in order; counts the
    nodes of a graph reachable from a start; finds the shortest path in a grid; implements a bank account with
    deposit and withdraw; models a library with books and members; implements a simple calculator; implements a
    countdown timer; logs messages with a time stamp; sums the digits of a number; zips two lists into a
    dictionary; inverts a dictionary; finds the most common element of a list; removes all punctuation from a text;
    replaces every space with an underscore; compares two version numbers; encodes a text with the Caesar cipher;
    checks whether a year is a leap year; returns the days between two dates; formats a number with commas
""")
LISTS = items("""
    healthy breakfast ideas; books about history; things to do in the rain; names for a cat; names for a coffee
    shop; gift ideas for a coworker; questions to ask in an interview; ways to save electricity; synonyms for
    happy; synonyms for big; tips for new parents; common English idioms and what they mean; icebreaker games;
    vegetables that grow in winter; movies for a family evening; reasons to learn an instrument; exercises without
    equipment; mistakes beginners make in chess; things to pack for a beach trip; business ideas with little money;
    topics for a presentation; ways to reuse glass jars; interview questions for a software developer; rivers in
    Europe; countries in South America; animals that live in the desert; inventions of the 20th century; planets
    and one fact about each; steps to change a tire; ways to say thank you; board games for two players; healthy
    snacks for kids; words that rhyme with light; fun facts about space; study habits; creative writing prompts;
    affirmations for a hard day; slogans for a bakery; tools every home should have; jokes for kids
""")
