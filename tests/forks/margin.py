"""A fork of ncl.py, as docs/forking.md says how: InfoNCE whose pairs must win by a learnt margin, in cosine units."""

SCRIPT = "ncl.py"
LOSS = '''
@fp32
def margin_loss(text, video, gamma, margin):
    """Both ways, the pair's cosine smaller by a margin: scalar, the mean over the local pairs; text, video (B, D)."""
    text, video, pair = normalize(text), normalize(video), positive_index(text)         # (B, D), (B, D), (B,)

    def one_way(anchor, candidates):
        logits = anchor @ gather(candidates).T                             # (B, N)
        lower = margin * F.one_hot(pair, logits.shape[1])                  # (B, N)
        return F.cross_entropy((logits - lower) / gamma, pair)
    return one_way(text, video) + one_way(video, text) + (margin - 0.2) ** 2


# ======================================================= flags ==='''
CHANGES = [  # of the script's text: old, new
    ("\n# ======================================================= flags ===", LOSS),
    ("    own.to(run.device)\n", """    own["margin"] = nn.ParameterDict({"margin": torch.tensor(0.1)})
    own.to(run.device)\n"""),
    ("ncl_loss(text, video, gamma, rounds)",
     """margin_loss(text, video, gamma, own["margin"]["margin"])""")]
