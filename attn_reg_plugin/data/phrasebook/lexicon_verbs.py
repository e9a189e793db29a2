"""The verbs of the phrasebook. Tables only: words in three languages, and what they go with."""

from __future__ import annotations

from attn_reg_plugin.data.phrasebook.entries import Motion, Verb, verb

_PEOPLE_AND_ANIMALS = "person kin animal"

TRANSITIVE: tuple[Verb, ...] = (
    verb(
        ("see saw", "vedea văzut vadă văd vezi vede vedem vedeți văd", "gör"),
        "person kin animal vehicle building drawable",
        subjects=_PEOPLE_AND_ANIMALS,
        flags="stative",
    ),
    verb(
        ("hear heard", "auzi auzit audă aud auzi aude auzim auziți aud", "duy"),
        "person animal vehicle heard",
        subjects=_PEOPLE_AND_ANIMALS,
        flags="stative specific",
    ),
    verb(
        ("buy bought", "cumpăra cumpărat cumpere cumpăr cumperi cumpără cumpărăm cumpărați cumpără", "satın al"),
        "goods",
        places="shop",
        flags="benefit unowned",
    ),
    verb(
        ("sell sold", "vinde vândut vândă vând vinzi vinde vindem vindeți vând", "sat"),
        "goods",
        places="shop",
    ),
    verb(("read read", "citi citit esc", "oku"), "text", places="inside outside"),
    verb(
        ("write wrote", "scrie scris scrie scriu scrii scrie scriem scrieți scriu", "yaz"),
        "written",
        places="inside",
        flags="benefit",
    ),
    verb(
        ("eat ate", "mânca mâncat mănânce mănânc mănânci mănâncă mâncăm mâncați mănâncă", "ye/yi"),
        "food",
        places="inside outside eating",
    ),
    verb(("drink drank", "bea băut bea beau bei bea bem beți beau", "iç"), "drink", places="outside eating"),
    verb(
        ("open", "deschide deschis deschidă deschid deschizi deschide deschidem deschideți deschid", "aç"),
        "openable",
    ),
    verb(
        ("close", "închide închis închidă închid închizi închide închidem închideți închid", "kapat"),
        "openable",
    ),
    verb(
        ("clean", "curăța curățat curețe curăț cureți curăță curățăm curățați curăță", "temizle"),
        "cleanable",
        flags="specific",
    ),
    verb(
        ("wash", "spăla spălat spele spăl speli spală spălăm spălați spală", "yıka"),
        "washable",
    ),
    verb(("find found", "găsi găsit esc", "bul"), "small animal", places="outside", flags="event"),
    verb(
        ("lose lost", "pierde pierdut piardă pierd pierzi pierde pierdem pierdeți pierd", "kaybet/kaybed"),
        "small",
        places="meeting outside",
        flags="event",
    ),
    verb(
        ("forget forgot forgetting", "uita uitat uite uit uiți uită uităm uitați uită", "unut"),
        "small",
        flags="event specific",
    ),
    verb(
        ("hide hid", "ascunde ascuns ascundă ascund ascunzi ascunde ascundem ascundeți ascund", "sakla"),
        "small",
        places="inside outside",
    ),
    verb(
        ("carry", "căra cărat care car cari cară cărăm cărați cară", "taşı"),
        "small portable",
    ),
    verb(
        ("look", "căuta căutat caute caut cauți caută căutăm căutați caută", "ara"),
        "small person animal",
        places="inside outside",
        prepositions=("for", ""),
    ),
    verb(("love", "iubi iubit esc", "sev"), "person kin animal", flags="present stative specific timeless"),
    verb(
        ("wait", "aștepta așteptat aștepte aștept aștepți așteaptă așteptăm așteptați așteaptă", "bekle"),
        "person kin public",
        places="meeting",
        flags="specific",
        prepositions=("for", ""),
    ),
    verb(
        ("help", "ajuta ajutat ajute ajut ajuți ajută ajutăm ajutați ajută", "yardım et/yardım ed"),
        "person kin",
        flags="specific",
        case="dative",
    ),
    verb(
        ("know knew", "cunoaște cunoscut cunoască cunosc cunoști cunoaște cunoaștem cunoașteți cunosc", "tanı"),
        "person kin",
        flags="present stative specific timeless",
    ),
    verb(("visit", "vizita vizitat ez", "ziyaret et/ziyaret ed"), "visited person kin", flags="specific"),
    verb(("paint", "vopsi vopsit esc", "boya"), "paintable", flags="specific"),
    verb(("draw drew", "desena desenat ez", "çiz"), "drawable", places="inside outside", flags="benefit"),
    verb(("build built", "construi construit esc", "inşa et/inşa ed"), "built", flags="benefit unowned"),
    verb(
        ("repair", "repara reparat repare repar repari repară reparăm reparați repară", "tamir et/tamir ed"),
        "repairable",
        flags="benefit",
    ),
    verb(("cook", "găti gătit esc", "pişir"), "cookable", places="cooking", flags="benefit"),
    verb(
        ("talk", "vorbi vorbit esc", "konuş"),
        "person kin",
        places="meeting outside",
        flags="specific",
        prepositions=("to", "cu"),
        case="instrumental",
    ),
    verb(
        ("listen", "asculta ascultat asculte ascult asculți ascultă ascultăm ascultați ascultă", "dinle"),
        "person kin heard",
        places="inside",
        prepositions=("to", ""),
    ),
    verb(
        (
            "understand understood",
            "înțelege înțeles înțeleagă înțeleg înțelegi înțelege înțelegem înțelegeți înțeleg",
            "anla",
        ),
        "understood",
        flags="stative specific",
    ),
    verb(
        ("follow", "urmări urmărit esc", "takip et/takip ed"),
        "person animal vehicle",
        flags="specific",
        subjects=_PEOPLE_AND_ANIMALS,
    ),
    verb(("cut cut cutting", "tăia tăiat taie tai tai taie tăiem tăiați taie", "kes"), "cuttable"),
    verb(
        ("break broke", "sparge spart spargă sparg spargi sparge spargem spargeți sparg", "kır"),
        "breakable",
        flags="event",
    ),
    verb(
        ("choose chose", "alege ales aleagă aleg alegi alege alegem alegeți aleg", "seç"),
        "goods",
        places="shop",
        flags="benefit unowned",
    ),
    verb(("wear wore", "purta purtat poarte port porți poartă purtăm purtați poartă", "giy"), "clothes"),
    verb(
        ("invite", "invita invitat invite invit inviți invită invităm invitați invită", "davet et/davet ed"),
        "person kin",
        flags="specific",
    ),
    verb(
        ("catch caught", "prinde prins prindă prind prinzi prinde prindem prindeți prind", "yakala"),
        "animal",
        places="outside",
        flags="event specific",
        subjects=_PEOPLE_AND_ANIMALS,
    ),
    verb(("feed fed", "hrăni hrănit esc", "besle"), "animal", places="outside", flags="specific"),
    verb(
        ("drive drove", "conduce condus conducă conduc conduci conduce conducem conduceți conduc", "sür"),
        "driven",
    ),
)
"""Verbs with a direct object (or one behind a preposition)."""

GIVING: tuple[Verb, ...] = (
    verb(("give gave", "da dat dea dau dai dă dăm dați dau", "ver"), "small"),
    verb(("show showed", "arăta arătat arate arăt arăți arată arătăm arătați arată", "göster"), "small animal vehicle"),
    verb(
        ("send sent", "trimite trimis trimită trimit trimiți trimite trimitem trimiteți trimit", "gönder"),
        "small",
    ),
    verb(("bring brought", "aduce adus aducă aduc aduci aduce aducem aduceți aduc", "getir"), "small food"),
    verb(("sell sold", "vinde vândut vândă vând vinzi vinde vindem vindeți vând", "sat"), "goods"),
)
"""Verbs with an object and a recipient."""

MOTION: tuple[tuple[Verb, Motion], ...] = (
    (
        verb(
            ("go went", "merge mers meargă merg mergi merge mergem mergeți merg", "git/gid"),
            subjects=_PEOPLE_AND_ANIMALS,
        ),
        Motion("to", False, "dative"),
    ),
    (
        verb(("come came", "veni venit vină vin vii vine venim veniți vin", "gel"), subjects=_PEOPLE_AND_ANIMALS),
        Motion("from", True, "ablative"),
    ),
    (
        verb(("leave left", "pleca plecat plece plec pleci pleacă plecăm plecați pleacă", "ayrıl")),
        Motion("", True, "ablative"),
    ),
    (
        verb(("arrive", "ajunge ajuns ajungă ajung ajungi ajunge ajungem ajungeți ajung", "ulaş"), flags="event"),
        Motion("at", False, "dative"),
    ),
)
"""Verbs with a goal or a source, and how they join it."""

INTRANSITIVE: tuple[Verb, ...] = (
    verb(
        ("run ran running", "alerga alergat alerge alerg alergi aleargă alergăm alergați aleargă", "koş"),
        subjects=_PEOPLE_AND_ANIMALS,
        places="outside",
    ),
    verb(
        ("sleep slept", "dormi dormit doarmă dorm dormi doarme dormim dormiți dorm", "uyu"),
        subjects=_PEOPLE_AND_ANIMALS,
        places="inside outside home",
    ),
    verb(("work", "lucra lucrat ez", "çalış"), places="work town cooking"),
    verb(
        ("sing sang", "cânta cântat cânte cânt cânți cântă cântăm cântați cântă", "şarkı söyle"),
        places="inside outside eating",
    ),
    verb(("dance", "dansa dansat ez", "dans et/dans ed"), places="inside outside eating"),
    verb(
        ("swim swam swimming", "înota înotat înoate înot înoți înoată înotăm înotați înoată", "yüz"),
        subjects=_PEOPLE_AND_ANIMALS,
        places="water",
    ),
    verb(("laugh", "râde râs râdă râd râzi râde râdem râdeți râd", "gül"), places="inside outside meeting"),
    verb(
        ("cry", "plânge plâns plângă plâng plângi plânge plângem plângeți plâng", "ağla"),
        places="inside outside meeting",
    ),
    verb(("live", "locui locuit esc", "yaşa"), places="home", flags="stative present timeless"),
    verb(
        ("stay", "rămâne rămas rămână rămân rămâi rămâne rămânem rămâneți rămân", "kal"),
        subjects=_PEOPLE_AND_ANIMALS,
        places="inside outside home work",
    ),
)
"""Verbs without an object, with a place."""

REPORTING: tuple[Verb, ...] = (
    verb(("know knew", "ști știut știe știu știi știe știm știți știu", "bil"), flags="stative present"),
    verb(("say said", "spune spus spună spun spui spune spunem spuneți spun", "söyle"), flags="stative"),
    verb(("think thought", "crede crezut creadă cred crezi crede credem credeți cred", "düşün"), flags="stative"),
    verb(("hear heard", "auzi auzit audă aud auzi aude auzim auziți aud", "duy"), flags="stative past"),
    verb(("hope", "spera sperat spere sper speri speră sperăm sperați speră", "um"), flags="stative present"),
)
"""Verbs with a that-clause. ("Know" that something is so is another word than to know somebody.)"""

WANT: Verb = verb(("want", "vrea vrut vrea vreau vrei vrea vrem vreți vor", "iste"), flags="stative")
CAN: Verb = verb(("can could", "putea putut poată pot poți poate putem puteți pot", "ebil"))
"""Only its Romanian is conjugated as a verb: Turkish has a suffix for it."""
