//! Copies, transitions and passes: one gather per unit, every new value used.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{OperationKind, ProcessGroup};
use burn_fsdp_shard::{ShardPolicy, backward, memory, order};

use super::bench::{
    Case, SEED, assert_close, build, device, on_ranks, optimizer, plainly_stepped, ready, seeded,
    since, stepped,
};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn gathers(world: &ProcessGroup, body: impl FnOnce() -> f32) -> (f32, u64) {
    let before = world.counts();
    let value = body();
    let counts = since(world, &before);
    (value, counts.of(OperationKind::AllGather).operations)
}

struct Scale(f32);

impl ModuleMapper for Scale {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let by = self.0;
        param.map(|tensor| {
            let (device, trainable) = (tensor.device(), tensor.is_require_grad());
            let scaled = tensor.inner().mul_scalar(by).into_data();
            Tensor::from_data(scaled, &device).set_require_grad(trainable)
        })
    }
}

/// The loss of the plain module after the same steps and mappings.
fn plain_loss(mapping: impl Fn(Mlp) -> Mlp) -> f32 {
    let device = device();
    let model = ready(|| seeded((MLP.build)(&device), SEED));
    let model = mapping(model);
    model.loss(0, 0, &device).into_scalar()
}

fn assert_near(got: f32, want: f32) {
    assert!(
        (got - want).abs() <= 1e-5 * want.abs(),
        "{got}, expected {want}"
    );
}

#[test]
fn every_transition_gathers_each_unit_once_and_uses_the_new_values() {
    let scaled = plain_loss(|model| model.map(&mut Scale(0.5)));
    let untouched = plain_loss(|model| model);
    on_ranks(2, move |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let model = build(MLP, &world, &device, blocks())?;
        // Every rank computes rank 0's batch, so the losses equal the plain module's.
        let tracked = |model: &Mlp| gathers(&world, || model.loss(0, 0, &device).into_scalar());
        let plain = |model: &Mlp| gathers(&world, || model.loss(0, 0, &inner).into_scalar());
        assert_eq!(tracked(&model).1, 4);

        let half = model.clone().map(&mut Scale(0.5));
        let (loss, number) = tracked(&half);
        assert_near(loss, scaled);
        assert_eq!(number, 4, "after map");
        let (loss, number) = tracked(&model);
        assert_near(loss, untouched);
        assert_eq!(
            number, 3,
            "the other copy, whose root is unsharded since its last forward"
        );

        let frozen = half.valid();
        let (loss, number) = plain(&frozen);
        assert_near(loss, scaled);
        assert_eq!(number, 4, "after valid");
        let (loss, number) = tracked(&frozen.train());
        assert_near(loss, scaled);
        assert_eq!(number, 4, "after train");
        let (loss, number) = tracked(&half.fork(&device));
        assert_near(loss, scaled);
        assert_eq!(number, 4, "after fork");
        Ok(())
    });
}

#[test]
fn a_mapped_submodule_works_with_its_old_siblings() {
    let want = plain_loss(|mut model| {
        model.blocks[1].up = model.blocks[1].up.clone().map(&mut Scale(0.5));
        model
    });
    on_ranks(2, move |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        model.blocks[1].up = model.blocks[1].up.clone().map(&mut Scale(0.5));
        let loss: f32 = model.loss(0, 0, &device).into_scalar();
        assert_near(loss, want);
        Ok(())
    });
}

#[test]
fn two_live_copies_train_side_by_side() {
    on_ranks(2, move |world| {
        let device = device();
        let first = build(MLP, &world, &device, blocks())?;
        let mut copies = [first.clone(), first];
        let mut optims = [optimizer(), optimizer()];
        for step in 0..3 {
            for (copy, optim) in copies.iter_mut().zip(&mut optims) {
                let model = copy.clone();
                let loss = model.loss(world.rank(), step, &device);
                let gradients = backward(loss, &model)?;
                *copy = optim.step(1e-2, model, gradients);
            }
        }
        let losses = copies.map(|copy| copy.loss(0, 0, &device).into_scalar::<f32>());
        assert_eq!(losses[0], losses[1]);
        Ok(())
    });
}

/// The same batch with the losses of the next one.
const LATER: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| model.loss(rank, step + 1, device),
};

/// Both batches in one loss.
const JOINED: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| {
        model.loss(rank, step, device) + model.loss(rank, step + 1, device)
    },
};

#[test]
fn burns_own_loop_works_unchanged() {
    let burns = stepped(MLP, 2, blocks(), |model, world, device| {
        let loss = model.loss(world.rank(), 0, device);
        Ok(GradientsParams::from_grads(loss.backward(), model))
    });
    assert_close(&burns, &plainly_stepped(MLP, 2), 1e-5);
    let ours = stepped(MLP, 2, blocks(), |model, world, device| {
        backward(model.loss(world.rank(), 0, device), model)
    });
    assert_eq!(ours.params, burns.params);
}

#[test]
fn several_forwards_before_one_backward_sum_up() {
    let sum = stepped(MLP, 2, blocks(), |model, world, device| {
        backward((JOINED.loss)(model, world.rank(), 0, device), model)
    });
    assert_close(&sum, &plainly_stepped(JOINED, 2), 1e-5);
}

#[test]
fn two_forwards_can_have_separate_backwards() {
    for (case, index) in [(MLP, 0), (LATER, 1)] {
        let own = stepped(MLP, 2, blocks(), move |model, world, device| {
            let losses = [0, 1].map(|step| model.loss(world.rank(), step, device));
            let mut gradients = Vec::new();
            for loss in losses {
                gradients.push(backward(loss, model)?);
            }
            Ok(gradients.swap_remove(index))
        });
        assert_close(&own, &plainly_stepped(case, 2), 1e-5);
    }
}

#[test]
fn two_roots_in_one_loss() {
    for is_first in [true, false] {
        // The second root sees the next batch.
        let got = stepped(MLP, 2, blocks(), move |model, world, device| {
            let rank = world.rank();
            let other = build(MLP, world, device, blocks())?;
            let (first, second) = if is_first {
                (model, &other)
            } else {
                (&other, model)
            };
            let loss = first.loss(rank, 0, device) + second.loss(rank, 1, device);
            let mut gradients = loss.backward();
            let ours = GradientsParams::from_module(&mut gradients, first);
            let theirs = GradientsParams::from_module(&mut gradients, second);
            Ok(if is_first { ours } else { theirs })
        });
        let case = if is_first { MLP } else { LATER };
        assert_close(&got, &plainly_stepped(case, 2), 1e-5);
    }
}

#[test]
fn evaluation_gathers_runs_and_frees() {
    on_ranks(2, |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let model = build(MLP, &world, &device, blocks())?;
        let frozen = model.valid();
        let (_, number) = gathers(&world, || frozen.loss(0, 0, &inner).into_scalar());
        assert_eq!(number, 4);
        let kept = memory(&model)?.unsharded_live;
        let root = 4 * (11 * 15 + 15 * 7);
        assert_eq!(
            kept, root,
            "the root stays for the next batch, the blocks do not"
        );
        drop(frozen);
        assert_eq!(memory(&model)?.unsharded_live, 0);
        Ok(())
    });
}

#[test]
fn nothing_is_left_after_a_step() {
    on_ranks(3, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = optimizer();
        for step in 0..3 {
            let loss = model.loss(world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            assert_eq!(memory(&model)?.unsharded_live, 0);
            model = optim.step(1e-2, model, gradients);
        }
        assert_eq!(memory(&model)?.unsharded_live, 0);
        Ok(())
    });
}

#[test]
fn the_order_is_the_same_on_all_ranks_and_readable() {
    let orders = on_ranks(3, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        backward(model.loss(world.rank(), 0, &device), &model)?;
        order(&model)
    });
    for order in &orders {
        assert_eq!(order, &orders[0]);
    }
    let expected = [
        "forward unshard root",
        "forward unshard blocks.0",
        "forward unshard blocks.1",
        "forward unshard blocks.2",
        "backward unshard blocks.2",
        "reduce blocks.2",
        "backward unshard blocks.1",
        "reduce blocks.1",
        "backward unshard blocks.0",
        "reduce blocks.0",
        "reduce root",
    ];
    assert_eq!(orders[0].operations, expected);
}
