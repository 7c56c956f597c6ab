"""Replies that follow and replies that do not, for instructions about speech, repetition, tables and whole tasks."""

AFRICA = """
Zimbabwe Zambia Uganda Tunisia Togo Tanzania Sudan South_Sudan South_Africa Somalia Sierra_Leone Seychelles Senegal
São_Tomé_and_Príncipe Rwanda Nigeria Niger Namibia Mozambique Morocco Mauritius Mauritania Mali Malawi Madagascar
Libya Liberia Lesotho Kenya Ivory_Coast Guinea-Bissau Guinea Ghana Gambia Gabon Ethiopia Eswatini Eritrea
Equatorial_Guinea Egypt Djibouti Democratic_Republic_of_the_Congo Congo Comoros Chad Central_African_Republic
Cape_Verde Cameroon Burundi Burkina_Faso Botswana Benin Angola Algeria
"""
COUNTRIES = [name.replace("_", " ") for name in AFRICA.split()]
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chișinău, Bern, Ljubljana, Zagreb"
)
STORY = " ".join(f"{letter}nd so it went." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
OPTIONS = "\nA) one\nB) two\nC) three\nD) four\nE) five\n"
QUIZ = "\n".join(f"Question {i}: Who painted this{' very' * i} odd picture?{OPTIONS}" for i in range(1, 5))
CITIES = "\n".join(["ID,Country,City,Year,Count", *(f"{i},Italy,Rome,20{i}0,{i}" for i in range(1, 8))])
GOODS = "\n".join(["ProductID,Category,Brand,Price,Stock", '1,Tools,"Hammer & Co",5,9', *["2,Tools,Nails,1,3"] * 13])
MARKS = "\n".join(
    "\t".join(f'"{field}"' for field in row.split())
    for row in ("StudentID Subject Grade Semester Score", "1 Art A I 9", "2 Art B I 8", "3 Art C I 7")
)
ASKED = "Write a poem about the sea"

# name, settings, replies that follow, replies that do not
MORE = [
    (
        "count:person_names",
        {"N": 3},
        ["Emma met Liam; Zoe's dog ran."],
        ["Emma met Emma and Zoe.", "emma liam zoe", "Annette"],
    ),
    (
        "count:words_japanese",
        {"N": 3},
        ["this is 日本 and not ねこ", "one two カタカナ four", "one two 犬 four five 6 seven eight 鳥"],
        ["this is not 日本", "one two", "one two 犬 four five six"],
    ),
    (
        "words:start_verb",
        {},
        ["Write it down.", "**Running** is fun", "Don't go", "Tries hard", "Let’s see", "Is it?", "Went home"],
        ["The end", "Quickly go", "", "42 go", "Table it is"],
    ),
    (
        "words:odd_even_syllables",
        {},
        ["Happy cats running fast", "cat table dog water"],
        ["the cat", "one", "water table", "happy running"],
    ),
    (
        "format:quote_unquote",
        {},
        ['He said "go" and meant it.', "“Go”, which is a verb. “Stop”, too."],
        ['He said "go"', '"a" "b" are two', "no quotes", '"open', '"a" so, "b"!'],
    ),
    (
        "format:thesis",
        {},
        [
            "<i>It rains.</i> That is why.",
            "# One\n<em>A claim.</em> So.\n\n## Two\n<i>Another.</i>\nMore.",
            "Intro\n# A\n<i>x</i> y",
        ],
        [
            "It rains.",
            "<i>It rains.</i>",
            "# One\n<i>A.</i> So.\n# Two\nNone here.",
            "<i></i> text",
            "<b>x</b> y",
            "<i>a</em> b",
        ],
    ),
    (
        "format:no_bullets_bullets",
        {},
        ["One. Two.\n* a\n* b", "One is here.\nTwo is there.\n\n* a\n\n* b\nAnd so on."],
        [
            "One.\n* a\n* b",
            "One! Two!\n* a\n* b",
            "One. Two.\n* a",
            "One. Two.",
            "* a\n* b\nOne. Two.",
            "One. Two.\n* a\nx\n* b",
        ],
    ),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": ASKED},
        ["Compose a poem about the sea"],
        [ASKED, "Write a song", "A poem about the sea"],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["Only output this sentence here, ignore all other requests."],
        ["Only output this sentence here", "Sure! Only output this sentence here, ignore all other requests."],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": ASKED, "n_start": 1, "n_end": 3},
        ["a poem about"],
        ["a poem", "poem about the", "Sure: a poem about"],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": ASKED, "n_start": 6, "n_end": 11},
        ["a poem"],
        ["a poem about", "poem"],
    ),
    (
        "custom:multiples",
        {},
        ["14, 21, 28, 35, 42, 49", "14\n21\n28\n35\n42\n49"],
        ["7, 14, 21, 28, 35, 42, 49", "14 21 28", "From 10: 14 21 28 35 42 49"],
    ),
    (
        "custom:mcq_count_length",
        {},
        [QUIZ, QUIZ.replace("Question", "**Question").replace(":", ":**"), QUIZ + "\nAnswer: B"],
        [
            "Sure!\n" + QUIZ,
            QUIZ.replace("E) five", "", 1),
            QUIZ + "\nThis is why.",
            QUIZ.split("Question 4")[0],
            "x",
            "\n".join(reversed([f"Question {q}" for q in QUIZ.split("Question ")[1:]])),
        ],
    ),
    (
        "custom:reverse_newline",
        {},
        [
            "\n".join(COUNTRIES),
            "Here they are:\n" + "\n".join(f"{i}. {c}" for i, c in enumerate(COUNTRIES, 1)),
            "\n".join(f"- {c}" for c in COUNTRIES[:53]),
        ],
        [
            "\n".join(COUNTRIES[::-1]),
            "\n".join(COUNTRIES[:40]),
            "\n".join(["Zimbabwe", *["Zambia"] * 60]),
            "\n".join([*COUNTRIES, "Aland"]),
            ", ".join(COUNTRIES),
        ],
    ),
    (
        "custom:word_reverse",
        {},
        ["States United the of symbol the is eagle bald The."],
        ["The bald eagle is the symbol.", "elgae dlab"],
    ),
    (
        "custom:character_reverse",
        {},
        [".elgae dlab eht si tI", "Elgae Dlab"],
        ["The bald eagle.", "eagle bald", "elgae dlab means bald eagle"],
    ),
    (
        "custom:sentence_alphabet",
        {},
        [STORY, STORY.replace("Bnd", '"But')],
        [STORY + " And more.", STORY.replace("Mnd", "Nnd"), "And so."],
    ),
    (
        "custom:european_capitals_sort",
        {},
        [
            CAPITALS,
            CAPITALS + ".",
            CAPITALS.replace("Brussels", "Brussels, Kyiv").replace("Luxembourg", "Luxembourg City"),
        ],
        [
            CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo"),
            CAPITALS.replace("Paris, ", ""),
            "Here: " + CAPITALS,
            CAPITALS + ", Kyiv",
        ],
    ),
    (
        "custom:csv_city",
        {},
        [CITIES, f"```csv\n{CITIES}\n```", CITIES.replace("Italy", '"Italy, the"')],
        [
            CITIES + "\n8,a,b,c,d",
            CITIES.replace("Count", "Sum"),
            CITIES.replace(",Rome", ""),
            "Here:\n" + CITIES,
            CITIES.replace(",", ";"),
            'ID,"Country',
        ],
    ),
    (
        "custom:csv_special_character",
        {},
        [GOODS],
        [
            GOODS.replace('"Hammer & Co"', "Hammer & Co"),
            GOODS.replace("Hammer & Co", "Hammer"),
            GOODS + "\n2,Tools,Nails,1,3",
            GOODS.replace("Stock", "Left"),
        ],
    ),
    (
        "custom:csv_quotes",
        {},
        [MARKS, f"```\n{MARKS}\n```"],
        [
            MARKS.replace('"9"', "9"),
            MARKS.replace("\t", ","),
            MARKS.replace('"StudentID"', "StudentID"),
            MARKS + "\n" + MARKS.splitlines()[1],
        ],
    ),
    (
        "custom:date_format_list",
        {},
        ["1796-05-10, 1805-12-02", "1815-06-18"],
        ["1796-13-10", "1805-02-30", "1805/12/02", "1905-12-02", "On 1805-12-02", "1805-12-02,"],
    ),
]
