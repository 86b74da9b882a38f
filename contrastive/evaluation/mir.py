"""Multi-instance retrieval of a data set, as EPIC-KITCHENS-100 scores it (evaluation/metrics.py: mir_metrics)."""

from contrastive.engine.processes import UserError, on_card
from contrastive.evaluation.embed import encode_texts, together
from contrastive.evaluation.metrics import MIR, class_relevancy, mir_chance, mir_metrics, multi_hot, normalize


def mir_of(model, tokenizer, pieces, device):
    """mir_metrics as ({image_to_text, text_to_image, mAP, nDCG, mAP_binary}, the same for chance); ({}, {}) if the set
    has no relevancies. Collective.

    The texts are the set's own sentences (EPIC-KITCHENS). Other sets use their distinct captions, with relevancies from
    the columns verb and noun, or nouns."""
    data, index, text = pieces["data"], pieces["index"], pieces["text"]
    if data.sentences is not None:
        text = encode_texts(model, tokenizer, data.sentences.texts, device)  # (C, D)
        relevancy = data.sentences.relevancy(data.rows[index])  # (M, C)
    elif data.column("verb") is not None and data.column("noun") is not None:
        verb, single = data.column("verb")[index], data.column("noun")[index]  # (M,) each
        several = data.column("nouns")
        lists = [[n] for n in single] if several is None else [several[i] for i in index]
        nouns = multi_hot(lists, 1 + max(max(n) for n in lists))  # (M, K)
        owner, first = pieces["owner"], {}  # owner (C,)
        for c, t in enumerate(pieces["texts"]):
            first.setdefault((t, verb[owner[c]], tuple(sorted(lists[owner[c]]))), c)
        columns = list(first.values())
        text, said = text[columns], owner[columns]
        relevancy = class_relevancy(verb, nouns, verb[said], nouns[said])  # (M, C)
    else:
        return {}, {}

    def both():
        images, texts = on_card(device, pieces["image"], text)  # (M, D), (C, D)
        return mir_metrics(normalize(images) @ normalize(texts).T, relevancy), mir_chance(relevancy)
    names = {"rows": "image_to_text", "columns": "text_to_image"}
    metrics, chance = ({names.get(k, k): v for k, v in m.items()} for m in together(both))
    return metrics, chance


def table_lines(metrics, chance, ways):
    """mir_of as lines of a table, each number with its chance level. ways: ((name of a direction, its label), ...)."""
    lines = []
    for label, m, c in (*((label, metrics[name], chance[name]) for name, label in ways), ("both", metrics, chance)):
        cells = [f"{k} {m[k]:5.1f} ({c[k]:5.1f})" for k in MIR]
        lines.append(f"{'MIR ' + label:<22}   {'   '.join(cells)}")
    left_out = metrics["image_to_text"]["no_match"] + metrics["text_to_image"]["no_match"]
    if left_out:
        lines.append(f"{'':<22}   queries without an item of relevancy 1, left out of mAP: {left_out}")
    return lines


def task(case):
    """The task mir of eval.py: writes the numbers of a Case (evaluation/case.py) into case.metrics and case.chance."""
    subject = case.subject
    metrics, chance = mir_of(subject.model, subject.tokenizer, case.pieces, subject.device)
    if not metrics:
        raise UserError("the set has no relevancies (no verb and noun classes)")
    case.metrics["mir"], case.chance["mir"] = metrics, chance
