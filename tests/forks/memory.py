"""A fork of mama.py, as docs/forking.md says how: the texts of earlier steps are further candidates of each video."""

SCRIPT = "mama.py"
LOSS = '''
class Memory(nn.Module):
    """-log softmax of each video's pair among the texts of this batch and the last `size`; (B, D) each -> (B,)."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("texts", normalize(torch.randn(size, dim)))   # (size, D) in own: saved, resumed

    def forward(self, video, text, tau):
        texts = gather(normalize(text))                                    # (N, D)
        logits = normalize(video) @ torch.cat([texts, self.texts]).T / tau                   # (B, N + size)
        self.texts = torch.cat([texts.detach(), self.texts])[:len(self.texts)]
        return F.cross_entropy(logits, positive_index(video), reduction="none")


# ======================================================= flags ==='''
CHANGES = [  # of the script's text: old, new
    ("\n# ======================================================= flags ===", LOSS),
    ("    own.to(run.device)\n", """    own["memory"] = Memory(32, args.embed_dim)
    own.to(run.device)\n"""),
    ("sample = args.contrastive_weight * contrast(video, text, tau, mu)  # (B,)",
     """sample = own["memory"](video, text, tau)                           # (B,)""")]
