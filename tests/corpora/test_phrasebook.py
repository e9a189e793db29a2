"""The phrasebook: morphology by hand-written forms, whole sentences by hand, the corpus by its promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unicodedata
from itertools import islice, product
from pathlib import Path

import pytest

from attn_reg_plugin.data import phrasebook
from attn_reg_plugin.data.phrasebook import corpus, english, romanian, turkish
from attn_reg_plugin.data.phrasebook import lexicon_nouns as nouns
from attn_reg_plugin.data.phrasebook import lexicon_verbs as verbs
from attn_reg_plugin.data.phrasebook import lexicon_words as words
from attn_reg_plugin.data.phrasebook import meaning as m
from attn_reg_plugin.data.phrasebook.grammar import realize


def _rows(text: str) -> list[tuple[str, str]]:
    """The examples of a table, "what = its form", parted by semicolons and line ends."""
    cells = [cell for line in text.splitlines() for cell in line.split(";") if cell.strip()]
    return [tuple(part.strip() for part in cell.split("=")) for cell in cells]


def _person(text: str) -> tuple[int, bool]:
    """ "2s" is the second person singular, "3p" the third plural."""
    return int(text[0]), text[1] == "p"


_ROMANIAN_NOUNS = """
casă case f = casa casei casele caselor case; carte cărți f = cartea cărții cărțile cărților cărți
fată fete f = fata fetei fetele fetelor fete; femeie femei f = femeia femeii femeile femeilor femei
familie familii f = familia familiei familiile familiilor familii
cafea cafele f = cafeaua cafelei cafelele cafelelor cafele; cheie chei f = cheia cheii cheile cheilor chei
piață piețe f = piața pieței piețele piețelor piețe; leu lei m = leul leului leii leilor leu
băiat băieți m = băiatul băiatului băieții băieților băiat
frate frați m = fratele fratelui frații fraților frate; tată tați m = tatăl tatălui tații taților tată
copil copii m = copilul copilului copiii copiilor copil; ou ouă n = oul oului ouăle ouălor ou
unchi unchi m = unchiul unchiului unchii unchilor unchi
scaun scaune n = scaunul scaunului scaunele scaunelor scaun
tablou tablouri n = tabloul tabloului tablourile tablourilor tablou
radio radiouri n = radioul radioului radiourile radiourilor radio
"""


@pytest.mark.parametrize(("parts", "forms"), _rows(_ROMANIAN_NOUNS))
def test_romanian_nouns(parts: str, forms: str) -> None:
    noun = romanian.noun(parts)
    made = [romanian.definite(noun), romanian.genitive_dative(noun)]
    made += [romanian.definite(noun, plural=True), romanian.genitive_dative(noun, plural=True)]
    assert [*made, romanian.bare(noun, oblique=True)] == forms.split()


_AGREEMENT = """
mic mică mici, pisică pisici f, s = mică; mic mică mici, pisică pisici f, s oblique = mici
frumos frumoasă frumoși frumoase, băiat băieți m, p = frumoși; mare mari, casă case f, s = mare
frumos frumoasă frumoși frumoase, fată fete f, s oblique = frumoase; mare mari, casă case f, s oblique = mari
frumos frumoasă frumoși frumoase, scaun scaune n, s = frumos; roșu roșie roșii, măr mere n, p = roșii
frumos frumoasă frumoși frumoase, scaun scaune n, p = frumoase; meu mea mei mele, soră surori f, s oblique = mele
nostru noastră noștri noastre, frate frați m, p = noștri
"""


@pytest.mark.parametrize(("what", "form"), _rows(_AGREEMENT))
def test_romanian_agreement(what: str, form: str) -> None:
    adjective, noun, how = what.split(", ")
    assert romanian.pick(adjective, romanian.noun(noun), "p" in how.split(), "oblique" in how) == form


_SEE = "vedea văzut vadă văd vezi vede vedem vedeți văd"
_REGULAR = ("citi citit esc", "construi construit esc", "lucra lucrat ez")
_VERBS = {text.split()[0]: romanian.verb(text) for text in (_SEE, *_REGULAR)}
_CONJUGATION = """
citi present 1s = citesc; citi present 2s = citești; citi present 3s = citește; citi present 1p = citim
construi present 3p = construiesc; construi present 2p = construiți; lucra present 3s = lucrează
lucra present 1p = lucrăm; vedea present 3s îl = îl vede; vedea habit 3p = văd; vedea past 3s = a văzut
vedea past 3s îl = l-a văzut; vedea past 1p o = am văzut-o; vedea past 3p îi = i-au văzut
vedea past 2s le = le-ai văzut; vedea future 1s = voi vedea; vedea future 3s o = o va vedea
vedea future 3p = vor vedea; vedea subjunctive 3s = să vadă; vedea subjunctive 3p îl = să îl vadă
vedea subjunctive 1s = să văd; citi subjunctive 3s = să citească; lucra subjunctive 2s = să lucrezi
construi subjunctive 3s = să construiască; lucra subjunctive 3p = să lucreze; fi present 1s = sunt
fi present 3s = este; fi past 3p = erau; fi future 3s = va fi
"""


@pytest.mark.parametrize(("what", "form"), _rows(_CONJUGATION))
def test_romanian_conjugation(what: str, form: str) -> None:
    key, tense, who, *clitic = what.split()
    if key == "fi":
        assert romanian.be(tense, *_person(who)) == form
        return
    if tense == "subjunctive":
        assert romanian.subjunctive(_VERBS[key], *_person(who), *clitic) == form
    else:
        assert romanian.conjugate(_VERBS[key], tense, *_person(who), *clitic) == form


def test_a_romanian_verb_without_all_its_forms_is_refused() -> None:
    with pytest.raises(ValueError, match="needs six forms"):
        romanian.verb("vedea văzut vadă văd vezi")


_TURKISH_NOUNS = """
ev = evi eve evde evden evin evle evler; göz = gözü göze gözde gözden gözün gözle gözler
kitap/kitab = kitabı kitaba kitapta kitaptan kitabın kitapla kitaplar
çocuk/çocuğ = çocuğu çocuğa çocukta çocuktan çocuğun çocukla çocuklar
araba = arabayı arabaya arabada arabadan arabanın arabayla arabalar
ağaç/ağac = ağacı ağaca ağaçta ağaçtan ağacın ağaçla ağaçlar
kurt/kurd = kurdu kurda kurtta kurttan kurdun kurtla kurtlar; at = atı ata atta attan atın atla atlar
top = topu topa topta toptan topun topla toplar; su/suy = suyu suya suda sudan suyun suyla sular
şehir/şehr = şehri şehre şehirde şehirden şehrin şehirle şehirler
köprü = köprüyü köprüye köprüde köprüden köprünün köprüyle köprüler
dükkân = dükkânı dükkâna dükkânda dükkândan dükkânın dükkânla dükkânlar
"""


@pytest.mark.parametrize(("noun", "forms"), _rows(_TURKISH_NOUNS))
def test_turkish_cases(noun: str, forms: str) -> None:
    stem = turkish.noun(noun)
    made = [turkish.CASES[case](stem).form for case in list(turkish.CASES)[1:]]
    assert [*made, turkish.plural(stem).form] == forms.split()


_CHAINS = """
ev 1s = evim; ev 1p locative = evimizde; ev 3s locative = evinde; ev 3p = evleri; göz 1s = gözüm
kitap/kitab 1s accusative = kitabımı; kitap/kitab 3s accusative = kitabını; araba 1s = arabam
araba 3s = arabası; araba 3s dative = arabasına; araba 3s ablative = arabasından; su/suy 3s = suyu
araba 3s instrumental = arabasıyla; araba 2s genitive = arabanın; oğul/oğl 3s = oğlu
oğul/oğl 1s dative = oğluma; ev plural 1s locative = evlerimde; çocuk/çocuğ plural 3s accusative = çocuklarını
Ana accusative = Ana'yı; Ana genitive = Ana'nın; Murat genitive = Murat'ın; Robert locative = Robert'te
Victor accusative = Victor'u; Daniel instrumental = Daniel'le; saat* accusative = saati; saat* locative = saatte
saat* plural = saatler; saat* 1s = saatim; saat accusative = saatı
"""


@pytest.mark.parametrize(("what", "form"), _rows(_CHAINS))
def test_turkish_suffix_chains_and_names(what: str, form: str) -> None:
    """A star marks front suffixes (saat), which the last vowel alone would not give."""
    noun, *suffixes = what.split()
    stem = turkish.noun(noun.rstrip("*"), front="*" in noun)
    stem = turkish.Stem(noun, proper=True) if noun[0].isupper() else stem
    for suffix in suffixes:
        if suffix[0].isdigit():
            stem = turkish.possessive(stem, *_person(suffix))
        else:
            stem = turkish.plural(stem) if suffix == "plural" else turkish.CASES[suffix](stem)
    assert stem.form == form


_TENSES = """
git/gid present 3s = gidiyor; git/gid past 3s = gitti; git/gid past 3s not = gitmedi
git/gid future 1s = gideceğim; git/gid future 1p not = gitmeyeceğiz; git/gid present 2s ? = gidiyor musun
git/gid present 3p ? = gidiyorlar mı; gör present 1s = görüyorum; gör past 1p = gördük; gör past 2s ? = gördün mü
oku present 3s = okuyor; oku present 3s not = okumuyor; oku future 2s ? = okuyacak mısın
bekle present 3s = bekliyor; bekle past 3p = beklediler; boya present 1s = boyuyorum; aç past 3s = açtı
söyle present 3s = söylüyor; ye/yi present 3s = yiyor; ye/yi future 3s = yiyecek
ye/yi future 3s not = yemeyecek; ye/yi past 1s = yedim; et/ed present 1p = ediyoruz
"""


@pytest.mark.parametrize(("what", "form"), _rows(_TENSES))
def test_turkish_tenses(what: str, form: str) -> None:
    verb, tense, who, *more = what.split()
    made = turkish.finite(turkish.verb(verb), tense, *_person(who), "not" in more, "?" in more)
    assert made == form


_FUNCTIONS = """
plural box = boxes; plural city = cities; plural boy = boys; third_person go = goes; past carry = carried
past hope = hoped; gerund write = writing; gerund see = seeing; indefinite old house = an old house
indefinite university = a university; genitive children = children's; genitive actress = actress's
necessity_stem oku = okumalı; ability_stem sat = satabilir; ability_stem git/gid = gidebilir
infinitive oku = okumak; subject_participle ye/yi = yiyen; subject_participle bekle = bekleyen
capitalize iki ırmak = İki ırmak; capitalize ırmak = Irmak
"""


@pytest.mark.parametrize(("what", "form"), _rows(_FUNCTIONS))
def test_functions_of_one_word(what: str, form: str) -> None:
    function, _, word = what.partition(" ")
    if hasattr(turkish, function) and function not in ("plural", "past", "indefinite", "genitive"):
        assert getattr(turkish, function)(word if function == "capitalize" else turkish.verb(word)) == form
    else:
        assert getattr(english, function)(word) == form


_PERSONS = """
with_person okumalı 1s = okumalıyım; with_person hasta 1s = hastayım; with_person yorgun 1p = yorgunuz
past_with_person büyük 3s = büyüktü; past_with_person hasta 1s = hastaydım; question yorgun 2s = yorgun musun
inability oku 1s = okuyamam; inability git/gid 1p = gidemeyiz; inability gör 3s = göremez
"""


@pytest.mark.parametrize(("what", "form"), _rows(_PERSONS))
def test_turkish_personal_endings(what: str, form: str) -> None:
    function, word, who = what.split()
    assert getattr(turkish, function)(turkish.verb(word) if function == "inability" else word, *_person(who)) == form


def test_other_forms() -> None:
    go, come = turkish.verb("git/gid"), turkish.verb("gel")
    assert turkish.necessity_stem(go, negative=True) == "gitmemeli"
    assert turkish.subject_participle(go, negative=True) == "gitmeyen"
    assert turkish.clause_noun(come, "past", 3, True).form == "geldikleri"
    assert turkish.clause_noun(come, "future", 1, False).form == "geleceğim"
    assert turkish.question("küçük", 3, past=True) == "küçük müydü"
    assert english.noun("wolf wolves").plural == "wolves"
    assert english.verb("cut cut cutting").gerund == "cutting"
    assert english.genitive("students", plural=True) == "students'"
    assert english.be(3, True, past=True) == "were"


N = {noun.key: noun for noun in (*nouns.NOUNS, *nouns.NAMES)}
A = {adjective.key: adjective for adjective in words.ADJECTIVES}
T = {time.key: time for time in words.TIMES}
V = {verb.key: verb for verb in (*verbs.GIVING, *verbs.INTRANSITIVE, *verbs.TRANSITIVE)}


def _np(text: str, **more: object) -> m.Phrase:
    """A phrase from "the black cat", "my sister" or "the red house s", the last one plural."""
    determiner, *adjective, noun = text.removesuffix(" s").split()
    plural = text.endswith(" s")
    return m.Phrase(N[noun], determiner, plural, A[adjective[0]] if adjective else None, **more)


def _do(subject: object, verb: str, tense: str, thing: object = None, **more: object) -> m.Clause:
    thing = _np(thing) if isinstance(thing, str) else thing
    return m.Clause(_np(subject) if isinstance(subject, str) else subject, V[verb], tense, thing, **more)


def _move(subject: object, verb: str, place: str, **more: object) -> m.Clause:
    mover, motion = next(pair for pair in verbs.MOTION if pair[0].key == verb)
    return m.Clause(subject, mover, "past", place=m.Place(_np(place)), motion=motion, **more)


_CATS = m.Phrase(N["cat"], "quantity", True, quantity=words.QUANTITIES[1])
_SHOPPING = _do(N["Ana"], "buy", "past", "the book")
_MEANINGS = (
    m.Plain(_do("the small cat", "see", "present", "the red house s")),
    m.Plain(_do(m.YOU, "buy", "past", "a book", beneficiary=_np("the girl")), asks=True),
    m.Plain(_move(m.I, "go", "the village", time=T["yesterday"], negative=True)),
    m.Plain(m.State(m.Phrase(N["house"], "of", possessor=_np("the doctor")), A["old (thing)"])),
    m.Plain(m.State(_np("the car"), A["fast"], standard=_np("the truck"))),
    m.Plain(m.Existence(_CATS, m.Place(_np("the garden")))),
    m.Plain(m.Existence(_np("no wolf"), m.Place(_np("the bridge"), "near"), "past")),
    m.Plain(_do(m.WE, "wait", "future", "the train", place=m.Place(_np("the station")))),
    m.Plain(_do(m.I, "give", "past", "the book", recipient=_np("the small girl"))),
    m.Plain(_do(m.THEY, "help", "past", "my sister")),
    m.Plain(_do("the nurse", "drink", "habit", "bare milk", time=T["every day"])),
    m.Plain(_do("the girl", "read", "present", "a letter", modal="want")),
    m.Plain(_do(m.I, "repair", "present", "the clock", modal="can", negative=True)),
    m.Plain(_do("the girl", "follow", "present", N["Murat"], modal="must")),
    m.Plain(m.Location(_np("the black cat"), m.Place(_np("the table"), "under"), "past"), asks=True),
    m.Plain(_do(m.WHO, "open", "past", "the window"), asks=True),
    m.Plain(_do(m.WHO, "drink", "past", "bare wine"), asks=True),
    m.Wh("when", _do("the farmer", "sell", "future", "the horse")),
    m.Report(m.I, verbs.REPORTING[0], "present", _SHOPPING),
    m.Joined(m.State(m.I, A["happy"]), "because", _move(_np("your mother"), "come", "the city")),
    m.Joined(_do(m.I, "close", "past", "the door"), "and", _do(m.YOU, "clean", "past", "the kitchen")),
    m.Joined(_SHOPPING, "and", _do(N["Ana"], "hide", "past", "this letter"), shared=True),
    m.When(_move(_np("the train"), "come", "the city"), _do(m.WE, "eat", "past", "bare bread")),
    m.Plain(m.State(_np("the boy s", relative=m.Relative(V["read"], _np("the book"))), A["sad"])),
    m.Plain(_do(N["Ana"], "sleep", "present", place=m.Place(_np("a small house")))),
)
_SAID = """
The small cat sees the red houses. = Pisica mică vede casele roșii. = Küçük kedi kırmızı evleri görüyor.
Did you buy a book for the girl? = Ai cumpărat o carte pentru fată? = Kız için bir kitap satın aldın mı?
I did not go to the village yesterday. = Nu am mers în sat ieri. = Dün köye gitmedim.
The doctor's house is old. = Casa doctorului este veche. = Doktorun evi eski.
The car is faster than the truck. = Mașina este mai rapidă decât camionul. = Araba kamyondan daha hızlı.
There are three cats in the garden. = În grădină sunt trei pisici. = Bahçede üç kedi var.
There was no wolf near the bridge. = Lângă pod nu era niciun lup. = Köprünün yanında kurt yoktu.
We will wait for the train at the station. = Vom aștepta trenul la gară. = İstasyonda treni bekleyeceğiz.
I gave the book to the small girl. = I-am dat fetei mici cartea. = Kitabı küçük kıza verdim.
They helped my sister. = Ei au ajutat-o pe sora mea. = Onlar kız kardeşime yardım ettiler.
The nurse drinks milk every day. = Asistenta bea lapte în fiecare zi. = Hemşire her gün süt içiyor.
The girl wants to read a letter. = Fata vrea să citească o scrisoare. = Kız bir mektup okumak istiyor.
I cannot repair the clock. = Nu pot să repar ceasul. = Saati tamir edemem.
The girl must follow Murat. = Fata trebuie să îl urmărească pe Murat. = Kız Murat'ı takip etmeli.
Was the black cat under the table? = Pisica neagră era sub masă? = Siyah kedi masanın altında mıydı?
Who opened the window? = Cine a deschis fereastra? = Pencereyi kim açtı?
Who drank wine? = Cine a băut vin? = Kim şarap içti?
When will the farmer sell the horse? = Când va vinde fermierul calul? = Çiftçi atı ne zaman satacak?
I know that Ana bought the book. = Știu că Ana a cumpărat cartea. = Ana'nın kitabı satın aldığını biliyorum.
I am happy because your mother came from the city. = Sunt fericit pentru că mama ta a venit din oraș. \
    = Mutluyum, çünkü annen şehirden geldi.
I closed the door and you cleaned the kitchen. = Eu am închis ușa, iar tu ai curățat bucătăria. \
    = Ben kapıyı kapattım ve sen mutfağı temizledin.
Ana bought the book and hid this letter. = Ana a cumpărat cartea și a ascuns această scrisoare. \
    = Ana kitabı satın aldı ve bu mektubu sakladı.
When the train came from the city, we ate bread. = Când trenul a venit din oraș, noi am mâncat pâine. \
    = Tren şehirden geldiğinde ekmek yedik.
The boys who read the book are sad. = Băieții care au citit cartea sunt triști. = Kitabı okuyan oğlanlar üzgün.
Ana is sleeping in a small house. = Ana doarme într-o casă mică. = Ana küçük bir evde uyuyor.
"""


@pytest.mark.parametrize(("meaning", "said"), list(zip(_MEANINGS, _rows(_SAID), strict=True)))
def test_whole_sentences(meaning: m.Sentence, said: tuple[str, ...]) -> None:
    assert realize(meaning) == said


def test_combinations_and_lexemes_of_a_sentence() -> None:
    adjectives = {("adjective-noun", "small", "cat"), ("adjective-noun", "red", "house")}
    assert m.combinations(_MEANINGS[0]) == {("verb-object", "see", "house")} | adjectives
    assert m.lexemes(_MEANINGS[0]) == {"Noun:cat", "Noun:house", "Verb:see", "Adjective:small", "Adjective:red"}


@pytest.fixture(scope="module")
def stream() -> list[phrasebook.Triple]:
    return list(islice(phrasebook.sentences(seed=2), 20_000))


@pytest.fixture(scope="module")
def made() -> dict[str, list]:
    return phrasebook.splits(2000, 150, 200)


@pytest.fixture(scope="module")
def meant() -> dict[tuple, m.Sentence]:
    return {triple: meaning for meaning, triple in islice(corpus.meanings(seed=1), 8000)}


@pytest.mark.parametrize(
    ("language", "letters", "foreign"), [("en", "w", "ășıç"), ("ro", "ăâîșț", "şţğı"), ("tr", "çğışöü", "șțăqx")]
)
def test_twenty_thousand_distinct_sentences(
    stream: list[phrasebook.Triple], language: str, letters: str, foreign: str
) -> None:
    sides = [getattr(triple, language) for triple in stream]
    assert len(sides) == len(set(sides)) == 20_000
    for side in sides:
        assert side == unicodedata.normalize("NFC", side).strip()
        assert side[0].isupper() and side[-1] in ".?" and "  " not in side and " ." not in side
    assert 5 <= sum(len(side.split()) for side in sides) / len(sides) <= 10
    used = set("".join(sides).lower())
    assert set(letters) <= used and not set(foreign) & used


def test_every_template_is_drawn(meant: dict[tuple, m.Sentence]) -> None:
    kinds = {type(meaning) for meaning in meant.values()}
    assert kinds == {m.Plain, m.Wh, m.Report, m.Joined, m.When}
    clauses = {type(meaning.clause) for meaning in meant.values() if isinstance(meaning, m.Plain)}
    assert clauses == {m.Clause, m.State, m.Location, m.Existence}


def test_splits_hold_out_combinations_of_known_words(made: dict[str, list], meant: dict[tuple, m.Sentence]) -> None:
    assert {name: len(split) for name, split in made.items()} == {"train": 2000, "valid": 150, "test": 200}
    for side in range(3):
        assert len({triple[side] for split in made.values() for triple in split}) == 2350
    pairs = {pair for triple in made["train"] for pair in m.combinations(meant[triple])}
    known = {word for triple in made["train"] for word in m.lexemes(meant[triple])}
    assert len(pairs) > 500 and not any(map(corpus.is_held_out, pairs))
    for triple in made["valid"] + made["test"]:
        assert any(map(corpus.is_held_out, m.combinations(meant[triple])))
        assert m.lexemes(meant[triple]) <= known


def test_a_tiny_train_is_filled_up_with_unknown_words() -> None:
    made = phrasebook.splits(3, 4, 5)
    assert [len(made[name]) for name in ("train", "valid", "test")] == [3, 4, 5]


def test_the_files_are_the_splits_whatever_the_hash_seed(tmp_path: Path) -> None:
    folder, made = tmp_path / "new" / "folder", phrasebook.splits(300, 30, 40, seed=7)
    code = "import sys, attn_reg_plugin.data.phrasebook as p; p.write_phrasebook(sys.argv[1], 300, 30, 40, 7)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment)
    assert len(list(folder.iterdir())) == 9
    for split, language in product(("train", "valid", "test"), ("en", "ro", "tr")):
        lines = "".join(getattr(row, language) + "\n" for row in made[split])
        assert (folder / f"{split}.{language}").read_bytes() == lines.encode("utf-8")
    assert made["train"] != phrasebook.splits(300, 30, 40, seed=8)["train"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 5, 5), "The sizes of the splits must be positive, not 0, 5 and 5."),
        ((5, 5, -1), "The sizes of the splits must be positive, not 5, 5 and -1."),
        ((100_000, 1, 1), "The phrasebook has 100000 sentences, but 100002 were asked for."),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        phrasebook.write_phrasebook(tmp_path / "no", *sizes)
    assert not (tmp_path / "no").exists()


def test_too_few_unseen_combinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_SENTENCES", 300)
    assert sum(1 for _ in phrasebook.sentences()) == 300
    with pytest.raises(ValueError, match=r"^The phrasebook has too few sentences for train=10, .*\.$"):
        phrasebook.write_phrasebook(tmp_path / "no", 10, 140, 150)
    assert not (tmp_path / "no").exists()
