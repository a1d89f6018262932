//! Adapters of Burn's `apply_lora`, in Burn's own loop.

use burn::module::{Lora, Module};

use super::network::{Net, items};
use super::{assert_close, by, device, folder, on, plainly, values};

fn adapted() -> Net {
    Net::new(&device()).apply_lora(Lora::new(2, 3.0))
}

#[test]
fn adapters_match_one_device() {
    let data = || (items(26, 1), items(6, 2));
    for (ranks, replicas) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
        let model = adapted();
        let (ours, burns) = (folder(), folder());
        let strategy = on(ranks).replicas(replicas);
        let got = by(&strategy, model.clone(), ours.path(), data(), |it| it);
        let got = got.unwrap_or_else(|error| panic!("{error}")).model;
        let want = plainly(model.clone(), burns.path(), data(), ranks, |it| it).model;
        assert_close(&got, &want, 1e-5);
        // Only factors have changed.
        let (before, after) = (values(&model), values(&got));
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            assert_eq!(before != after, path.contains("lora"), "{path}");
        }
        assert_eq!(after.len(), 6 + 4);
    }
}

#[test]
fn a_checkpoint_has_the_adapters() {
    let data = || (items(20, 1), items(6, 2));
    let model = adapted();
    let through = folder();
    let want = plainly(model.clone(), through.path(), data(), 2, |it| it).model;
    let first = folder();
    let one = by(&on(2), model.clone(), first.path(), data(), |training| {
        training.with_default_checkpointers().num_epochs(2)
    });
    one.unwrap_or_else(|error| panic!("{error}"));
    // The second model draws other factors, which the checkpoint replaces.
    let two = by(
        &on(2).replicas(2),
        adapted(),
        first.path(),
        data(),
        |training| training.with_default_checkpointers().checkpoint(2),
    );
    let two = two.unwrap_or_else(|error| panic!("{error}"));
    assert_close(&two.model, &want, 1e-5);
    // By Burn alone.
    let other = folder();
    let one = by(&on(2), model, other.path(), data(), |training| {
        training.with_default_checkpointers().num_epochs(1)
    });
    one.unwrap_or_else(|error| panic!("{error}"));
    let burns = plainly(adapted(), other.path(), data(), 2, |training| {
        training.with_default_checkpointers().checkpoint(1)
    });
    assert_close(&burns.model, &want, 1e-5);
}

/// Burn panics on checkpoints that it cannot load. With plain Burn, too, a weight in columns that `apply_lora` has
/// initialized does not load.
#[test]
fn a_checkpoint_that_burn_cannot_load_is_an_error() {
    let data = || (items(8, 1), items(4, 2));
    let model = || Net::in_columns(&device()).apply_lora(Lora::new(2, 3.0));
    let at = folder();
    let resumed = |model, epoch| {
        let got = by(&on(2), model, at.path(), data(), |training| {
            let training = training.with_default_checkpointers().num_epochs(2);
            match epoch {
                None => training.num_epochs(1),
                Some(epoch) => training.checkpoint(epoch),
            }
        });
        got.err().map(|error| error.to_string())
    };
    assert_eq!(resumed(model(), None), None);
    let refused = resumed(model(), Some(1)).expect("in columns");
    assert!(
        refused.contains("hidden.weight") && refused.contains("`LinearLayout::Row`"),
        "{refused}"
    );
    let refused = resumed(model(), Some(7)).expect("no such file");
    assert!(refused.contains("model-7"), "{refused}");
    // Without adapters, the weight is loaded.
    let plain = folder();
    for epoch in [None, Some(1)] {
        let got = by(
            &on(2),
            Net::in_columns(&device()),
            plain.path(),
            data(),
            |training| {
                let training = training.with_default_checkpointers();
                match epoch {
                    None => training.num_epochs(1),
                    Some(epoch) => training.num_epochs(2).checkpoint(epoch),
                }
            },
        );
        got.unwrap_or_else(|error| panic!("{error}"));
    }
}
