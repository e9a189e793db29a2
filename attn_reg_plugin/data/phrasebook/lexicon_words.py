"""Adjectives, adverbs of time, numbers and determiners. Tables only."""

from __future__ import annotations

from attn_reg_plugin.data.phrasebook.entries import Adjective, Quantity, Time, adjective
from attn_reg_plugin.data.phrasebook.romanian import adjective as romanian_adjective

_OBJECTS = "thing furniture vehicle building area room clothes"

ADJECTIVES: tuple[Adjective, ...] = (
    adjective("big bigger", "mare mari", "büyük", "animal thing furniture vehicle building area room plant fruit"),
    adjective(
        "small smaller", "mic mică mici", "küçük", "animal thing furniture vehicle building area room plant young fruit"
    ),
    adjective("new newer", "nou nouă noi", "yeni", "thing furniture vehicle building clothes text titled bridge"),
    adjective("old older", "vechi veche vechi", "eski", _OBJECTS + " text titled", " (thing)"),
    adjective("old older", "bătrân bătrână bătrâni bătrâne", "yaşlı", "adult animal", " (person)"),
    adjective("young younger", "tânăr tânără tineri tinere", "genç", "adult"),
    adjective("good better", "bun bună buni bune", "iyi", "person titled fruit"),
    adjective("bad worse", "rău rea răi rele", "kötü", "adult"),
    adjective(
        "beautiful more",
        "frumos frumoasă frumoși frumoase",
        "güzel",
        "thing furniture building area room clothes plant titled farm pet",
    ),
    adjective("ugly uglier", "urât urâtă urâți urâte", "çirkin", "thing furniture clothes building"),
    adjective("red", "roșu roșie roșii", "kırmızı", "colored"),
    adjective("blue", "albastru albastră albaștri albastre", "mavi", "clothes vehicle furniture"),
    adjective("green", "verde verzi", "yeşil", "colored"),
    adjective("yellow", "galben galbenă galbeni galbene", "sarı", "colored"),
    adjective("white", "alb albă albi albe", "beyaz", "clothes vehicle furniture painted"),
    adjective("black", "negru neagră negri negre", "siyah", "clothes vehicle painted"),
    adjective("tall taller", "înalt înaltă înalți înalte", "yüksek", "tall", " (thing)"),
    adjective("tall taller", "înalt înaltă înalți înalte", "uzun boylu", "adult", " (person)"),
    adjective("long longer", "lung lungă lungi", "uzun", "long"),
    adjective("short shorter", "scurt scurtă scurți scurte", "kısa", "long"),
    adjective("strong stronger", "puternic puternică puternici puternice", "güçlü", "adult strong"),
    adjective("clean cleaner", "curat curată curați curate", "temiz", "washable cleanable clothes"),
    adjective("dirty dirtier", "murdar murdară murdari murdare", "kirli", "washable cleanable clothes"),
    adjective("expensive more", "scump scumpă scumpi scumpe", "pahalı", "goods"),
    adjective("cheap cheaper", "ieftin ieftină ieftini ieftine", "ucuz", "goods"),
    adjective("heavy heavier", "greu grea grei grele", "ağır", "heavy furniture"),
    adjective("light lighter", "ușor ușoară ușori ușoare", "hafif", "heavy"),
    adjective("warm warmer", "cald caldă calzi calde", "sıcak", "warm room"),
    adjective("cold colder", "rece reci", "soğuk", "warm room drink water"),
    adjective("fresh fresher", "proaspăt proaspătă proaspeți proaspete", "taze", "fresh"),
    adjective("sweet sweeter", "dulce dulci", "tatlı", "sweet fruit"),
    adjective("rich richer", "bogat bogată bogați bogate", "zengin", "adult"),
    adjective("poor poorer", "sărac săracă săraci sărace", "fakir", "adult"),
    adjective("clever cleverer", "deștept deșteaptă deștepți deștepte", "akıllı", "person pet"),
    adjective("polite more", "politicos politicoasă politicoși politicoase", "kibar", "person"),
    adjective("famous more", "faimos faimoasă faimoși faimoase", "ünlü", "adult titled visited"),
    adjective("interesting more", "interesant interesantă interesanți interesante", "ilginç", "text titled visited"),
    adjective("round", "rotund rotundă rotunzi rotunde", "yuvarlak", "round"),
    adjective("fast faster", "rapid rapidă rapizi rapide", "hızlı", "vehicle ridden"),
    adjective("slow slower", "lent lentă lenți lente", "yavaş", "vehicle"),
    adjective("empty", "gol goală goi goale", "boş", "full room means"),
    adjective("full", "plin plină plini pline", "dolu", "full means"),
    adjective("quiet quieter", "liniștit liniștită liniștiți liniștite", "sakin", "young town outside room"),
    adjective("happy happier", "fericit fericită fericiți fericite", "mutlu", "person kin feeling"),
    adjective("sad sadder", "trist tristă triști triste", "üzgün", "person kin feeling"),
    adjective("tired more", "obosit obosită obosiți obosite", "yorgun", "person kin feeling"),
    adjective("ill", "bolnav bolnavă bolnavi bolnave", "hasta", "person kin feeling"),
)
"""Every adjective and the tags of the nouns it goes with; "feeling" also goes with pronouns."""


def _time(text: str, romanian: str, turkish: str, tenses: str) -> Time:
    return Time(text, text, romanian, turkish, frozenset(tenses.split()))


_DAYS = (
    ("Monday", "luni", "pazartesi günü"),
    ("Tuesday", "marți", "salı günü"),
    ("Wednesday", "miercuri", "çarşamba günü"),
    ("Thursday", "joi", "perşembe günü"),
    ("Friday", "vineri", "cuma günü"),
    ("Saturday", "sâmbătă", "cumartesi günü"),
    ("Sunday", "duminică", "pazar günü"),
)
_HOURS = (
    ("one", "unu", "birde"),
    ("two", "două", "ikide"),
    ("three", "trei", "üçte"),
    ("four", "patru", "dörtte"),
    ("five", "cinci", "beşte"),
    ("six", "șase", "altıda"),
    ("seven", "șapte", "yedide"),
    ("eight", "opt", "sekizde"),
    ("nine", "nouă", "dokuzda"),
    ("ten", "zece", "onda"),
)

TIMES: tuple[Time, ...] = (
    _time("now", "acum", "şimdi", "present"),
    _time("today", "astăzi", "bugün", "past future"),
    _time("yesterday", "ieri", "dün", "past"),
    _time("last week", "săptămâna trecută", "geçen hafta", "past"),
    _time("last year", "anul trecut", "geçen yıl", "past"),
    _time("this morning", "în această dimineață", "bu sabah", "past"),
    _time("yesterday evening", "ieri seară", "dün akşam", "past"),
    _time("tomorrow", "mâine", "yarın", "future"),
    _time("tomorrow morning", "mâine dimineață", "yarın sabah", "future"),
    _time("tomorrow evening", "mâine seară", "yarın akşam", "future"),
    _time("next week", "săptămâna viitoare", "gelecek hafta", "future"),
    _time("next year", "anul viitor", "gelecek yıl", "future"),
    _time("every day", "în fiecare zi", "her gün", "habit"),
    _time("every morning", "în fiecare dimineață", "her sabah", "habit"),
    _time("every evening", "în fiecare seară", "her akşam", "habit"),
    _time("every week", "în fiecare săptămână", "her hafta", "habit"),
    *(_time(f"on {day}", ro, tr, "past future") for day, ro, tr in _DAYS),
    *(_time(f"at {hour} o'clock", f"la ora {ro}", f"saat {tr}", "past future") for hour, ro, tr in _HOURS),
)
"""Adverbs of time with the tenses they fit; "habit" is the present of what happens again and again."""

QUANTITIES: tuple[Quantity, ...] = tuple(
    Quantity(english, english, romanian_adjective(romanian), turkish)
    for english, romanian, turkish in (
        ("two", "doi două doi două", "iki"),
        ("three", "trei trei", "üç"),
        ("four", "patru patru", "dört"),
        ("five", "cinci cinci", "beş"),
        ("six", "șase șase", "altı"),
        ("seven", "șapte șapte", "yedi"),
        ("eight", "opt opt", "sekiz"),
        ("nine", "nouă nouă", "dokuz"),
        ("ten", "zece zece", "on"),
        ("many", "mulți multe mulți multe", "birçok"),
    )
)
"""The numbers two to ten and "many"."""
