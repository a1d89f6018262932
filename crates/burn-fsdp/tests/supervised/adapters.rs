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
