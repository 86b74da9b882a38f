"""Checks a data set before training: fingerprints, images that are in two splits, and a strict reading of every file.

    python -m tools.check --dataset photos/            # reads every image strictly and lists what cannot be read
"""

import common
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit
from contrastive.engine.verify import fingerprint, twin_words, twins, unreadable


def main(argv=None):
    """The command line: what a data set holds, and what of it cannot be read."""
    parser = OneLine("python -m tools.check", __doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="as in training")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column", "--label-column"):
        parser.add_argument(flag, default="", help="as in training")
    args = parser.parse_args(argv)
    options = {k: v for k, v in vars(args).items() if k != "dataset"}
    splits, reasons = {}, []
    for split in common.splits_of(args.dataset):
        try:
            splits[split] = common.load_data(args.dataset, split, **options)
        except UserError as error:  # other splits may exist, for example test images alone
            reasons.append(error)
            continue
        print(f"{split}: {fingerprint(splits[split])} {splits[split].note}")
    if not splits:
        raise reasons[0]
    for error in reasons:
        print(error)
    for split, data in splits.items():
        if split != "train" and "train" in splits:
            print(f"{split}: {twin_words(twins(splits['train'], data), data)}")
        for key, why in unreadable(data).items():
            print(f"{split}: {key}: {why}")


if __name__ == "__main__":
    with clean_exit():
        main()
