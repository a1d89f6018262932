//! Steps, under every policy.

use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType};
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_shard::{
    Audit, Clip, Cut, Norm, Precision, ShardPolicy, Strategy, backward, clip_grad_norm, evaluate,
    fully_shard, grad_norm, local_state, no_sync, recompute,
};

use super::bench::{Outcome, Way, assert_same, device, joined, on_ranks, optimizer, since};
use super::model::{
    Net, Once, Tied, assert_trained, build, mesh, plainly, plainly_by, sharded, sharded_by, step,
    whole,
};

/// Units with the fields together, with the fields apart, and with a field that is the only parameter of its unit.
fn units() -> [ShardPolicy; 4] {
    let policy = ShardPolicy::new;
    [
        policy(),
        policy().units(["blocks.*"]),
        policy().units(["embed", "blocks.*", "head"]),
        policy()
            .unit_of(["embed", "norm"])
            .units(["blocks", "middle"]),
    ]
}

#[test]
fn tied_fields_in_any_units_match_a_single_field() {
    for ranks in 1..=4 {
        let want = plainly(ranks, 6);
        for policy in units() {
            assert_trained(&sharded(ranks, 1, 6, policy.audit(Audit::EveryStep)), &want);
        }
    }
}

#[test]
fn tied_fields_train_with_every_strategy_cut_and_owner() {
    let want = plainly(3, 4);
    for policy in units() {
        for policy in [
            policy.clone().strategy(Strategy::ShardGradOp),
            policy.clone().strategy(Strategy::NoShard),
            policy.clone().cut(Cut::Dims),
            policy.clone().cut_of(["embed"], Cut::Dims),
            policy.clone().one_owner(["embed"]),
            policy.clone().one_owner(["**"]),
            policy.clone().whole_below(1000),
            policy.clone().prefetch(0),
            policy.clone().prefetch(3),
            policy.clone().reshard_root(true),
            policy.clone().offload_to(Device::flex()),
            policy.clone().reshard_after_forward_to(1),
        ] {
            assert_trained(&sharded(3, 1, 4, policy.audit(Audit::EveryStep)), &want);
        }
    }
}

/// The table's unit is used several times, so it steps at the end of backward.
#[test]
fn tied_fields_step_in_backward_as_after_it() {
    type Loss = fn(&Tied, usize, usize, &Device) -> burn::tensor::Tensor<1>;
    let losses: [Loss; 2] = [Tied::loss, in_regions];
    for ranks in 1..=4 {
        for policy in units() {
            for loss in losses {
                let run = |way| sharded_by(way, ranks, policy.clone(), loss);
                let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
                assert_same(&got, &want, "tied fields");
            }
        }
    }
}

#[test]
fn replicas_train_tied_fields() {
    let want = plainly(4, 4);
    for policy in units() {
        let policy = policy.replicate_axis("replicate").audit(Audit::EveryStep);
        assert_trained(&sharded(4, 2, 4, policy), &want);
    }
}

/// The table is gathered once for each use of its unit, in forward and in backward.
#[test]
fn the_table_is_gathered_once_for_each_use_and_reduced() {
    on_ranks(2, |world| {
        let policy = ShardPolicy::new().units(["embed", "blocks.*", "head"]);
        let mut model = build(&world, policy)?;
        let mut optim = optimizer();
        // The first step agrees on the order.
        for number in 0..2 {
            (model, _) = step(model, &mut optim, (world.rank(), number))?;
        }
        let before = world.counts();
        (_, _) = step(model, &mut optim, (world.rank(), 2))?;
        let counts = since(&world, &before);
        // Uses in order: the table, a block, the table in the middle, the other block, the norm's root, the table at
        // the end.
        let gathers = counts.of(OperationKind::AllGather).operations;
        let reductions = counts.of(OperationKind::ReduceScatter).operations;
        println!("{gathers} gathers, {reductions} reductions");
        assert!(
            gathers <= 2 * 6 && reductions <= 6,
            "{gathers}, {reductions}"
        );
        Ok(())
    });
}

#[test]
fn norms_count_tied_fields_once() {
    let clip = |ranks: usize| {
        plainly_by(ranks, 4, |gradients, model| {
            let mut sum = 0.0f32;
            let mut squares = Squares {
                gradients: &gradients,
                sum: &mut sum,
            };
            burn::module::Module::visit(model, &mut squares);
            let factor = (0.05 / (sum.sqrt() + 1e-6)).min(1.0);
            assert!(factor < 0.9, "it clips");
            scaled(gradients, model, factor)
        })
    };
    for ranks in 1..=3 {
        let outcomes = on_ranks(ranks, |world| {
            let device = device();
            let policy = ShardPolicy::new().units(["embed", "blocks.*", "head"]);
            let mut model = build(&world, policy)?;
            let mut optim = optimizer();
            let mut losses = Vec::new();
            for number in 0..4 {
                let loss = model.loss(world.rank(), number, &device);
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = backward(loss, &model)?;
                let norm = grad_norm(&model, &gradients, Norm::default())?;
                let clipped = clip_grad_norm(&model, gradients, Clip::to(0.05))?;
                assert_eq!(clipped.total_norm, norm);
                model = optim.step(1e-2, model, clipped.gradients);
            }
            Ok(Outcome {
                losses,
                params: whole(&model),
            })
        });
        assert_trained(&joined(&outcomes), &clip(ranks));
    }
}

struct Squares<'a> {
    gradients: &'a GradientsParams,
    sum: &'a mut f32,
}

impl burn::module::ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(
        &mut self,
        param: &burn::module::Param<burn::tensor::Tensor<D>>,
    ) {
        let gradient = self.gradients.get::<D>(param.id).expect("trained");
        *self.sum += gradient.powf_scalar(2.0).sum().into_scalar::<f32>();
    }
}

fn scaled(gradients: GradientsParams, model: &Once, factor: f32) -> GradientsParams {
    struct Scale(GradientsParams, GradientsParams, f32);
    impl burn::module::ModuleVisitor for Scale {
        fn visit_float<const D: usize>(
            &mut self,
            param: &burn::module::Param<burn::tensor::Tensor<D>>,
        ) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.1.register(param.id, gradient.mul_scalar(self.2));
            }
        }
    }
    let mut scale = Scale(gradients, GradientsParams::new(), factor);
    burn::module::Module::visit(model, &mut scale);
    scale.1
}

/// Two micro-batches per step, the first without reductions.
#[test]
fn gradients_that_wait_are_summed_once() {
    for ranks in 1..=3 {
        let batches = |rank: usize| [rank, rank + ranks];
        let device = super::bench::plain_device().autodiff();
        let mut once = Once::of_rank(0, &device);
        let mut optim = optimizer();
        for number in 0..3 {
            let parts = (0..ranks).flat_map(batches);
            let parts = parts.map(|part| once.loss(part, number, &device));
            let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
            let loss = sum.div_scalar(ranks as f32);
            let gradients = GradientsParams::from_grads(loss.backward(), &once);
            once = optim.step(1e-2, once, gradients);
        }
        let want = Outcome {
            losses: Vec::new(),
            params: super::bench::params(&once),
        };
        for policy in units() {
            let outcomes = on_ranks(ranks, move |world| {
                let device = super::bench::device();
                let mut model = build(&world, policy.clone())?;
                let mut optim = optimizer();
                for number in 0..3 {
                    let [first, second] = [world.rank(), world.rank() + ranks];
                    let held = || backward(model.loss(first, number, &device), &model);
                    drop(no_sync(&model, held)??);
                    let gradients = backward(model.loss(second, number, &device), &model)?;
                    model = optim.step(1e-2, model, gradients);
                }
                Ok(Outcome {
                    losses: Vec::new(),
                    params: whole(&model),
                })
            });
            assert_trained(&joined(&outcomes), &want);
        }
    }
}

/// A region reads a field whose parameter belongs to another unit.
#[test]
fn recomputed_regions_read_tied_fields() {
    for ranks in 1..=3 {
        let want = plainly(ranks, 3);
        for policy in units() {
            let outcomes = on_ranks(ranks, move |world| {
                let device = device();
                let mut model = build(&world, policy.clone())?;
                let mut optim = optimizer();
                let mut losses = Vec::new();
                for number in 0..3 {
                    let loss = in_regions(&model, world.rank(), number, &device);
                    losses.push(loss.clone().into_scalar::<f32>());
                    let gradients = backward(loss, &model)?;
                    model = optim.step(1e-2, model, gradients);
                }
                Ok(Outcome {
                    losses,
                    params: whole(&model),
                })
            });
            assert_trained(&joined(&outcomes), &want);
        }
    }
}

/// The loss of [`Net::loss`], with the middle and the head in regions.
fn in_regions(model: &Tied, rank: usize, step: usize, device: &Device) -> burn::tensor::Tensor<1> {
    use super::nets::tokens;
    use burn::tensor::Tensor;
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for (index, block) in model.blocks.iter().enumerate() {
        x = recompute(block, x, |block, x: Tensor<3>| block.forward(x));
        if index == 0 {
            x = recompute(&model.middle, x, |middle, x: Tensor<3>| {
                let scores = x
                    .clone()
                    .matmul(middle.weight.val().transpose().unsqueeze());
                x + scores
                    .matmul(middle.weight.val().unsqueeze())
                    .mul_scalar(0.1)
            });
        }
    }
    let x = model.norm.forward(x);
    let logits: Tensor<3> = recompute(&model.head, x, |head, x: Tensor<3>| {
        x.matmul(head.weight.val().transpose().unsqueeze())
    });
    logits.powf_scalar(2.0).mean()
}

/// Ranks evaluate along different routes, and only some read the second field.
#[test]
fn evaluations_read_tied_fields_on_some_ranks() {
    on_ranks(3, |world| {
        let policy = ShardPolicy::new().units(["embed", "blocks.*", "head"]);
        let model = build(&world, policy)?;
        let whole = whole(&model);
        let sum = evaluate(&model, |model| match world.rank() {
            0 => None,
            1 => Some(model.head.weight.val()),
            _ => {
                Some(model.embed.weight.val() + model.middle.weight.val() - model.head.weight.val())
            }
        })?;
        if let Some(sum) = sum {
            let values = sum.into_data().convert::<f32>().try_to_vec::<f32>();
            let want = &whole[0].1;
            let values = values.expect("numbers");
            let is_near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
            assert!(values.iter().zip(want).all(is_near), "the table");
        }
        Ok(())
    });
}

/// Both fields compute in the policy's types.
#[test]
fn tied_fields_compute_in_one_type() {
    on_ranks(2, |world| {
        let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
        let policy = ShardPolicy::new().units(["blocks.*"]).precision(precision);
        let model = build(&world, policy)?;
        let types = [
            &model.embed.weight,
            &model.middle.weight,
            &model.head.weight,
        ];
        for param in types {
            assert_eq!(param.val().dtype(), burn::tensor::DType::BF16);
        }
        Ok(())
    });
}

#[test]
fn frozen_fields_stay() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let mut once = Once::of_rank(world.rank(), &device());
            once.embed.weight = once.embed.weight.set_require_grad(false);
            let model = Tied::from(once);
            let policy = ShardPolicy::new().units(["embed", "blocks.*", "head"]);
            let model = fully_shard(model, &mesh(&world, 1)?, policy)?;
            let before = whole(&model);
            let mut optim = optimizer();
            let (model, _) = step(model, &mut optim, (world.rank(), 0))?;
            let after = whole(&model);
            assert_eq!(before[0], after[0]);
            assert_ne!(before[1], after[1]);
            let state = local_state(&model)?;
            assert_eq!(state[0].tied, ["middle.weight", "head.weight"]);
            Ok(())
        });
    }
}
