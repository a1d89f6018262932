//! Folders that earlier versions have written.

use std::path::Path;

use crate::network::{Item, items};
use crate::{assert_close, folder, logged, plain, sharded};

/// The files that the version of this commit has written at the end of the first epoch, on two ranks.
const WRITTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/supervised/of-17a27c1");

/// The losses of the later epochs, of training and validation, when that version continued.
const LOSSES: [(usize, f64, f64); 2] = [
    (2, 0.512_489_631_772_041_3, 0.268_988_966_941_833_5),
    (3, 0.137_807_982_663_313_54, 0.076_515_775_173_902_51),
];

fn data() -> (Vec<Item>, Vec<Item>) {
    (items(20, 1), items(6, 2))
}

/// Copies the checkpoint to the place where a training run looks for it.
fn copy_to(folder: &Path) {
    let to = folder.join("checkpoint");
    std::fs::create_dir(&to).expect("a folder");
    for name in ["model-1.bpk", "optim-1.bpk", "scheduler-1.bpk"] {
        let copied = std::fs::copy(Path::new(WRITTEN).join(name), to.join(name));
        copied.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn an_older_checkpoint_resumes_as_before() {
    let at = folder();
    copy_to(at.path());
    let resumed = sharded(at.path(), data(), 2, |training| {
        training.with_default_checkpointers().checkpoint(1)
    });
    resumed.unwrap_or_else(|error| panic!("{error}"));
    for (epoch, trained, validated) in LOSSES {
        for (split, expected) in [("train", trained), ("valid", validated)] {
            let (got, _) = logged(at.path(), split, epoch, "Loss");
            let off = (got - expected).abs();
            assert!(off < 1e-6, "{split} {epoch}: {got}, {expected}");
        }
    }
}

#[test]
fn an_older_checkpoint_resumes_on_any_number_of_ranks() {
    for ranks in 1..=4 {
        let (ours, burns) = (folder(), folder());
        copy_to(ours.path());
        copy_to(burns.path());
        let got = sharded(ours.path(), data(), ranks, |training| {
            training.with_default_checkpointers().checkpoint(1)
        });
        let got = got.unwrap_or_else(|error| panic!("{error}"));
        let expected = plain(burns.path(), data(), ranks, |training| {
            training.with_default_checkpointers().checkpoint(1)
        });
        assert_close(&got.model, &expected.model, 1e-5);
    }
}
