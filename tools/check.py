"""Reads every example of a data set before training, and lists what cannot be read.

    python -m tools.check --dataset photos/
"""

import common
from contrastive.data import splits_of
from contrastive.data.table import EmptySplit
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import clean_exit, first_line


def main(argv=None):
    """The command line: how many examples each split has, its note, and {key: reason} of those that cannot be read."""
    parser = OneLine("python -m tools.check", __doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="as in training")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column", "--label-column"):
        parser.add_argument(flag, default="", help="as in training")
    args = parser.parse_args(argv)
    options = {k: v for k, v in vars(args).items() if k != "dataset"}
    for split in splits_of(args.dataset):
        try:
            data = common.load_data(args.dataset, split, **options)
        except EmptySplit as error:
            print(error)
            continue
        print(f"{split}: {len(data):,} examples; {data.note}")
        for i in range(len(data)):
            try:
                data.read(i)
            except Exception as error:  # of any decoder
                print(f"{split}: {data.key(i)}: {first_line(error)}")


if __name__ == "__main__":
    with clean_exit():
        main()
