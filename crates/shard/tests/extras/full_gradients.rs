//! Whole gradients for a plain copy of the module, and their parts for the sharded module.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, WriteBack, backward, full_gradients, shard_gradients,
    summon_full_params, unsharded,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, joined, on_ranks, optimizer, plain_device,
    plainly_stepped, seeded, since, whole_params,
};
use super::gradients::{one_step, values};
use super::nets::{MLP, Mlp, RECURRENT};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// The gradients of plain Burn for the mean loss of all ranks.
fn plain_gradients<M: Module>(case: Case<M>, ranks: usize) -> Vec<(String, Vec<f32>)> {
    let device = plain_device().autodiff();
    let model = seeded((case.build)(&device), SEED);
    let losses = (0..ranks).map(|rank| (case.loss)(&model, rank, 0, &device));
    let loss = losses.reduce(|sum, part| sum + part).expect("a rank");
    let gradients = loss.div_scalar(ranks as f32).backward();
    values(&model, &GradientsParams::from_grads(gradients, &model))
}

fn check_case<M: Module + 'static>(case: Case<M>, policy: ShardPolicy) {
    for ranks in 1..=4 {
        let want = Outcome {
            losses: Vec::new(),
            params: plain_gradients(case, ranks),
        };
        let policy = policy.clone();
        let outcomes = on_ranks(ranks, move |world| {
            let device = device();
            let model = build(case, &world, &device, policy.clone())?;
            let loss = (case.loss)(&model, world.rank(), 0, &device);
            let gradients = backward(loss, &model)?;
            let full = full_gradients(&model, &gradients, true)?.expect("kept");
            let copy = unsharded(&model, true)?.expect("kept");
            let params = values(&copy, &full);
            let losses = Vec::new();
            Ok(Outcome { losses, params })
        });
        assert_close(&joined(&outcomes), &want, 1e-5);
    }
}

#[test]
fn whole_gradients_are_those_of_the_plain_module() {
    for policy in [
        blocks(),
        blocks().whole_below(110),
        blocks().shard_vectors(true),
        blocks().strategy(Strategy::NoShard),
        blocks().one_owner(["blocks.*"]),
    ] {
        check_case(MLP, policy);
    }
    check_case(RECURRENT, ShardPolicy::new().units(["layers.*"]));
}

/// An owner's unused parameter has no gradient anywhere, and the other ranks cannot know that by themselves.
#[test]
fn gathers_are_those_of_existing_gradients() {
    for policy in [blocks(), blocks().one_owner(["**"])] {
        on_ranks(3, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let head = Tensor::<3>::ones([2, 4, 15], &device);
            let loss = model.head.forward(head).mean();
            let gradients = backward(loss, &model)?;
            let before = world.counts();
            let keeps = world.rank() == 0;
            let full = full_gradients(&model, &gradients, keeps)?;
            let since = since(&world, &before);
            assert_eq!(since.of(OperationKind::Exchange).operations, 1);
            assert_eq!(since.of(OperationKind::AllGather).operations, 1, "the head");
            assert_eq!(full.is_some(), keeps);
            if let Some(full) = full {
                assert_eq!(full.len(), 2, "the head's weight and bias");
            }
            Ok(())
        });
    }
}

/// A step with changed whole gradients is the step of plain Burn with gradients changed in the same way.
#[test]
fn changed_gradients_are_handed_to_the_optimizer() {
    for ranks in 1..=4 {
        let want = plainly_stepped(DOUBLED, ranks);
        for policy in [
            blocks(),
            blocks().whole_below(110),
            blocks().strategy(Strategy::NoShard),
            blocks().one_owner(["blocks.*"]),
        ] {
            let outcomes = on_ranks(ranks, move |world| {
                let (model, gradients) = one_step(&world, policy.clone())?;
                let full = full_gradients(&model, &gradients, true)?.expect("kept");
                let mut copy = None;
                let model = summon_full_params(model, WriteBack::Discard, |full| {
                    copy = Some(full.clone());
                    full
                })?;
                let copy = copy.expect("the closure ran");
                let gradients = shard_gradients(&model, doubled(&copy, full))?;
                let model = optimizer().step(1e-2, model, gradients);
                Ok(Outcome {
                    losses: Vec::new(),
                    params: whole_params(Mlp::new(&device()), &model),
                })
            });
            assert_close(&joined(&outcomes), &want, 1e-5);
        }
    }
}

/// The module with twice its loss, whose gradients are twice as large.
const DOUBLED: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| model.loss(rank, step, device) * 2.0,
};

/// The gradients of a plain module, doubled.
fn doubled<M: Module>(module: &M, gradients: GradientsParams) -> GradientsParams {
    struct Double(GradientsParams);
    impl burn::module::ModuleVisitor for Double {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, gradient * 2.0);
            }
        }
    }
    let mut double = Double(gradients);
    module.visit(&mut double);
    double.0
}

#[test]
fn cutting_whole_gradients_gives_the_parts_back() {
    for ranks in 1..=4 {
        for policy in [blocks(), blocks().one_owner(["**"])] {
            on_ranks(ranks, move |world| {
                let (model, gradients) = one_step(&world, policy.clone())?;
                let want = values(&model, &gradients);
                let full = full_gradients(&model, &gradients, true)?.expect("kept");
                let parts = shard_gradients(&model, full)?;
                assert_eq!(values(&model, &parts), want);
                Ok(())
            });
        }
    }
}

#[test]
fn gradients_of_another_shape_are_rejected() {
    on_ranks(2, |world| {
        let (model, gradients) = one_step(&world, blocks())?;
        let mut full = full_gradients(&model, &gradients, true)?.expect("kept");
        let copy = unsharded(&model, true)?.expect("kept");
        let id = copy.blocks[1].up.weight.id;
        full.register(id, Tensor::<2>::ones([7, 15], &plain_device()));
        match shard_gradients(&model, full) {
            Err(Error::Returned { path, .. }) => assert_eq!(path, "blocks.1.up.weight"),
            other => panic!("{other:?}"),
        }
        Ok(())
    });
}
