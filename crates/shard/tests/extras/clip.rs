//! Clipping by the norm of all gradients, compared with one rank without sharding.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Clip, Cut, NonFinite, Norm, ShardPolicy, Strategy, backward, clip_grad_norm, fully_shard,
    grad_norm,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, is_host, on_ranks, optimizer, params, ready,
    seeded, seeded_by_rank, whole_params,
};
use super::gradients::{one_step, spoil, values};
use super::nets::{CONV_NET, MLP, Mlp, RECURRENT};

const STEPS: usize = 10;
const MAX_NORM: f64 = 0.05;
const NORMS: [Norm; 5] = [
    Norm::P(2.0),
    Norm::P(1.0),
    Norm::P(1.5),
    Norm::P(7.0),
    Norm::Infinity,
];

fn norm_of(values: impl Iterator<Item = f32>, norm: Norm) -> f64 {
    let values = values.map(|x| f64::from(x).abs());
    match norm {
        Norm::P(p) => values.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
        Norm::Infinity => values.fold(0.0, f64::max),
    }
}

fn scale_all<M: Module>(model: &M, gradients: &mut GradientsParams, factor: f64) {
    struct Scale<'a>(&'a mut GradientsParams, f64);
    impl burn::module::ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, gradient.mul_scalar(self.1));
            }
        }
    }
    model.visit(&mut Scale(gradients, factor));
}

/// Trains without sharding on the joined batch, clipping by hand. Norms by step.
fn plainly<M: Module + 'static>(case: Case<M>, ranks: usize, norm: Norm) -> (Outcome, Vec<f64>) {
    let device = Device::flex().autodiff();
    let mut model = seeded((case.build)(&device), SEED);
    let mut optim = optimizer();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let parts = (0..ranks).map(|rank| (case.loss)(&model, rank, step, &device));
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let loss = sum.div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let all = values(&model, &gradients);
        let total = norm_of(all.into_iter().flat_map(|(_, values)| values), norm);
        scale_all(&model, &mut gradients, (MAX_NORM / (total + 1e-6)).min(1.0));
        norms.push(total);
        model = optim.step(1e-2, model, gradients);
    }
    let params = params(&model);
    (Outcome { losses, params }, norms)
}

fn sharded<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    norm: Norm,
    policy: ShardPolicy,
) -> (Outcome, Vec<f64>) {
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(case, &world, &device, policy.clone())?;
        let mut optim = optimizer();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let loss = (case.loss)(&model, world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            let clipped = clip_grad_norm(&model, gradients, Clip::to(MAX_NORM).norm(norm))?;
            norms.push(clipped.total_norm);
            model = optim.step(1e-2, model, clipped.gradients);
        }
        let params = whole_params((case.build)(&device), &model);
        Ok((Outcome { losses, params }, norms))
    });
    let (mut first, norms) = outcomes[0].clone();
    for (outcome, other) in &outcomes {
        assert_eq!(other, &norms, "ranks agree on every bit of the norms");
        assert_eq!(outcome.params, first.params);
    }
    for (step, loss) in first.losses.iter_mut().enumerate() {
        let sum: f32 = outcomes
            .iter()
            .map(|(outcome, _)| outcome.losses[step])
            .sum();
        *loss = sum / ranks as f32;
    }
    (first, norms)
}

fn assert_parity<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    norm: Norm,
    policies: &[ShardPolicy],
) {
    let (want, want_norms) = plainly(case, ranks, norm);
    assert!(want_norms[0] > MAX_NORM, "it clips: {want_norms:?}");
    for policy in policies {
        let (got, norms) = sharded(case, ranks, norm, policy.clone());
        for (got, want) in norms.iter().zip(&want_norms) {
            let difference = (got - want).abs() / want;
            assert!(
                difference <= 1e-5,
                "{ranks} ranks, {norm:?}, {policy:?}: {got}, expected {want}"
            );
        }
        assert_close(&got, &want, 1e-5);
    }
}

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

#[test]
fn every_norm_over_every_mix_of_sharded_and_whole_parameters() {
    let mixes = [
        blocks(),
        // Some matrices whole, others sharded.
        blocks().whole_below(110).cut(Cut::Dims),
        blocks().strategy(Strategy::NoShard),
    ];
    for ranks in 1..=4 {
        for norm in NORMS {
            assert_parity(MLP, ranks, norm, &mixes);
        }
    }
}

#[test]
fn convolutions_with_batch_norm() {
    for ranks in 1..=4 {
        let policy = ShardPolicy::new().units(["convs.*"]);
        for norm in [Norm::P(2.0), Norm::Infinity] {
            assert_parity(CONV_NET, ranks, norm, std::slice::from_ref(&policy));
        }
    }
}

#[test]
fn recurrent_layers() {
    for ranks in 1..=4 {
        let policy = ShardPolicy::new().units(["layers.*"]);
        for norm in [Norm::P(2.0), Norm::P(3.0)] {
            assert_parity(RECURRENT, ranks, norm, std::slice::from_ref(&policy));
        }
    }
}

/// The accuracy of norms: the host computes them in 64 bits, and a device in 32.
fn accuracy() -> f64 {
    if is_host() { 1e-12 } else { 1e-6 }
}

#[test]
fn norms_of_shards_match_their_elements_exactly() {
    for ranks in 1..=4 {
        for norm in NORMS {
            let parts = on_ranks(ranks, move |world| {
                let (model, gradients) = one_step(&world, blocks())?;
                let total = grad_norm(&model, &gradients, norm)?;
                Ok((total, values(&model, &gradients), world.rank()))
            });
            let elements = parts.iter().flat_map(|(_, values, rank)| {
                // One-dimensional parameters are whole everywhere, and count from one rank.
                let counts = move |path: &str| {
                    *rank == 0 || !(path.ends_with("bias") || path.contains("norm"))
                };
                values.iter().filter(move |(path, _)| counts(path))
            });
            let want = norm_of(
                elements.flat_map(|(_, values)| values.iter().copied()),
                norm,
            );
            let got = parts[0].0;
            let near = (got - want).abs() <= accuracy() * want;
            assert!(near, "{got}, expected {want}");
        }
    }
}

#[test]
fn parameters_that_no_unit_manages_count_from_rank_0() {
    let parts = on_ranks(3, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 3)?)?;
        let model = ready(|| Mlp::new(&device));
        let own = ["embed", "blocks.1", "blocks.2", "norm", "head"];
        let model = fully_shard(model, &mesh, ShardPolicy::new().ignore(own))?;
        let loss = model.loss(world.rank(), 0, &device);
        let gradients = backward(loss, &model)?;
        let total = grad_norm(&model, &gradients, Norm::P(2.0))?;
        Ok((total, values(&model, &gradients), world.rank()))
    });
    let elements = parts.iter().flat_map(|(_, values, rank)| {
        let counts = move |path: &str| {
            let is_shard = path.starts_with("blocks.0.") && path.ends_with("weight");
            *rank == 0 || is_shard
        };
        values.iter().filter(move |(path, _)| counts(path))
    });
    let all = elements.flat_map(|(_, values)| values.iter().copied());
    let want = norm_of(all, Norm::P(2.0));
    for (got, ..) in &parts {
        let near = (got - want).abs() <= accuracy() * want;
        assert!(near, "{got}, expected {want}");
    }
}

#[test]
fn clipping_issues_one_all_reduce() {
    on_ranks(3, |world| {
        let (model, gradients) = one_step(&world, blocks())?;
        let counter = CommCounter::new([&world]);
        clip_grad_norm(&model, gradients, Clip::to(1.0))?;
        // On a device, one more lets all ranks use one result.
        let number = if is_host() { 1 } else { 2 };
        counter.expect(&[(OperationKind::AllReduce, number)]);
        Ok(())
    });
}

#[test]
fn missing_gradients_have_norm_zero_and_small_ones_are_not_scaled() {
    on_ranks(2, |world| {
        let (model, gradients) = one_step(&world, blocks())?;
        let nothing = clip_grad_norm(&model, GradientsParams::new(), Clip::to(1.0))?;
        assert_eq!((nothing.total_norm, nothing.coefficient), (0.0, 1.0));
        let before = values(&model, &gradients);
        let clipped = clip_grad_norm(&model, gradients, Clip::to(1e6))?;
        assert_eq!(clipped.coefficient, 1.0);
        assert_eq!(values(&model, &clipped.gradients), before);
        Ok(())
    });
}

/// Returns the results if one rank's gradient has `value` in it.
fn with_one(value: f32, nonfinite: NonFinite) -> Vec<Result<(f64, f64), String>> {
    on_ranks(2, move |world| {
        let (model, mut gradients) = one_step(&world, blocks())?;
        if world.rank() == 1 {
            spoil(&model, &mut gradients, value);
        }
        let clip = Clip::to(1.0).nonfinite(nonfinite);
        Ok(clip_grad_norm(&model, gradients, clip)
            .map(|clipped| (clipped.total_norm, clipped.coefficient))
            .map_err(|error| error.to_string()))
    })
}

#[test]
fn a_norm_that_is_not_finite_scales_as_in_pytorch() {
    for seen in with_one(f32::INFINITY, NonFinite::Scale) {
        assert_eq!(seen, Ok((f64::INFINITY, 0.0)));
    }
    for seen in with_one(f32::NAN, NonFinite::Scale) {
        let (norm, coefficient) = seen.expect("not refused");
        assert!(norm.is_nan() && coefficient.is_nan());
    }
}

#[test]
fn a_non_finite_norm_is_rejected_on_all_ranks_on_request() {
    let messages = with_one(f32::NAN, NonFinite::Refuse).into_iter();
    let messages: Vec<_> = messages.map(|seen| seen.expect_err("refused")).collect();
    assert!(
        messages[0].contains("but another rank has one"),
        "{}",
        messages[0]
    );
    assert!(messages[1].contains("rank 1"), "{}", messages[1]);
    assert!(messages[1].contains("`embed.weight`"), "{}", messages[1]);
    assert!(messages[1].contains("NaN"), "{}", messages[1]);
    assert!(messages[1].contains("NonFinite::Scale"), "{}", messages[1]);
}

#[test]
fn invalid_arguments_are_rejected() {
    on_ranks(1, |world| {
        let (model, gradients) = one_step(&world, blocks())?;
        let order = grad_norm(&model, &gradients, Norm::P(0.5)).expect_err("below 1");
        assert!(order.to_string().contains("norm is 0.5"), "{order}");
        let negative = clip_grad_norm(&model, gradients, Clip::to(-1.0)).expect_err("negative");
        assert!(
            negative.to_string().contains("max_norm is -1"),
            "{negative}"
        );
        let plain = grad_norm(
            &Mlp::new(&device()),
            &GradientsParams::new(),
            Norm::default(),
        );
        let plain = plain.expect_err("plain");
        assert!(plain.to_string().contains("fully_shard"), "{plain}");
        Ok(())
    });
}

/// The norm over a mesh of two axes equals the norm of the gradients on one rank: every shard counts once,
/// and no replica counts again.
#[test]
fn replicas_of_shards_have_the_norm_of_one_rank() {
    for layout in [[2, 2], [2, 1], [1, 3]] {
        let ranks = layout[0] * layout[1];
        for norm in NORMS {
            let (_, want) = plainly(MLP, ranks, norm);
            let norms = on_ranks(ranks, move |world| {
                let axes = [("replicate", layout[0]), ("shard", layout[1])];
                let mesh = ProcessMesh::new(&world, Mesh::new(axes)?)?;
                let device = device();
                let policy = blocks().replicate_axis("replicate");
                let model = seeded_by_rank((MLP.build)(&device), world.rank());
                let model = fully_shard(model, &mesh, policy)?;
                let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
                grad_norm(&model, &gradients, norm)
            });
            for got in norms {
                let difference = (got - want[0]).abs() / want[0];
                assert!(
                    difference <= 1e-5,
                    "{layout:?}, {norm:?}: {got}, expected {}",
                    want[0]
                );
            }
        }
    }
}
