//! Parameters with one owner, for optimizers that compute with whole tensors.

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ParamGroup};
use burn::optim::{
    AdafactorConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, MuonConfig,
    SgdConfig,
};
use burn::tensor::Device;
use burn_fsdp_collectives::{OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Clip, Error, LocalPart, Precision, ShardPolicy, Strategy, backward, check_elementwise,
    clip_grad_norm, fully_shard, local_state, no_sync, owner_groups, params_with_gradient,
    wrap_plan,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, joined, on_ranks, panic_of, params,
    plain_device, seeded, seeded_by_rank, since, whole_params,
};
use super::nets::{CONV_NET, MLP, Mlp};

pub(crate) type Make = fn() -> ModuleOptimizer;

const STEPS: usize = 4;

/// Muon for the matrices of the blocks and the head, AdamW for the rest.
fn muon() -> ModuleOptimizer {
    let matrices = ["up.weight", "gate.weight", "down.weight", "head.weight"];
    let matrices = ParamGroup::from_any_predicates(matrices.to_vec());
    adamw().with_group(matrices, MuonConfig::new().build(), None)
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-2).init()
}

/// Clips each gradient by its own norm: to less than any of them has.
fn clipping() -> ModuleOptimizer {
    adamw().with_grad_clipping(GradientClipping::Norm(1e-3))
}

pub(crate) const WHOLE: [(&str, Make); 5] = [
    ("muon", muon),
    ("adafactor", || AdafactorConfig::new().init()),
    ("lamb", || LambConfig::new().init()),
    ("clipping by norm", clipping),
    ("adamw", adamw),
];

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Trains without sharding, with the mean of the gradients that each rank's batch gives separately.
fn plainly<M: Module + 'static>(case: Case<M>, ranks: usize, make: Make) -> Outcome {
    let device = plain_device().autodiff();
    let mut model = seeded((case.build)(&device), SEED);
    let mut optimizer = make();
    for step in 0..STEPS {
        let of_rank = |rank| {
            let loss = (case.loss)(&model, rank, step, &device);
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let gradients = mean(&model, (0..ranks).map(of_rank).collect());
        model = optimizer.step(1e-2, model, gradients);
    }
    Outcome {
        losses: Vec::new(),
        params: params(&model),
    }
}

/// The mean of the ranks' gradients, summed in their order.
fn mean<M: Module>(model: &M, of_ranks: Vec<GradientsParams>) -> GradientsParams {
    use burn::module::{ModuleVisitor, Param};
    use burn::tensor::Tensor;

    struct Mean {
        of_ranks: Vec<GradientsParams>,
        mean: GradientsParams,
    }
    impl ModuleVisitor for Mean {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let num_ranks = self.of_ranks.len();
            let gradients = self.of_ranks.iter_mut();
            let gradients = gradients.filter_map(|of_rank| of_rank.remove::<D>(param.id));
            if let Some(sum) = gradients.reduce(|sum, next| sum + next) {
                let factor = 1.0 / num_ranks as f64;
                self.mean.register(param.id, sum.mul_scalar(factor));
            }
        }
    }
    let mut visitor = Mean {
        of_ranks,
        mean: GradientsParams::new(),
    };
    model.visit(&mut visitor);
    visitor.mean
}

fn stepped<M: Module + 'static>(
    mut model: M,
    case: Case<M>,
    rank: usize,
    make: Make,
) -> Result<Outcome, Error> {
    let device = device();
    let mut optimizer = make();
    for step in 0..STEPS {
        let gradients = backward((case.loss)(&model, rank, step, &device), &model)?;
        model = optimizer.step(1e-2, model, gradients);
    }
    Ok(Outcome {
        losses: Vec::new(),
        params: whole_params((case.build)(&device), &model),
    })
}

fn owned<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    make: Make,
    policy: ShardPolicy,
) -> Outcome {
    joined(&on_ranks(ranks, move |world| {
        let model = build(case, &world, &device(), policy.clone())?;
        stepped(model, case, world.rank(), make)
    }))
}

/// If the mean of the ranks' gradients has no rounding of its own, nothing else has any.
#[test]
fn optimizers_of_whole_tensors_match_unsharded_steps_bit_for_bit() {
    for ranks in [1, 2, 4, 8] {
        for (name, make) in WHOLE {
            let got = owned(MLP, ranks, make, blocks().one_owner(["**"]));
            let want = plainly(MLP, ranks, make);
            assert_eq!(got.params, want.params, "{name} on {ranks} ranks");
        }
    }
}

#[test]
fn every_policy_steps_as_one_rank_does() {
    let policies = [
        ("one unit", ShardPolicy::new()),
        ("shard-grad-op", blocks().strategy(Strategy::ShardGradOp)),
        ("prefetch", blocks().prefetch(2).reshard_root(true)),
        ("some whole everywhere", blocks().whole_below(110)),
        ("offload", blocks().offload_to(Device::flex())),
    ];
    let neighbours = [("two neighbours", blocks().reshard_after_forward_to(2))];
    for ranks in 2..=4 {
        let policies = match ranks {
            4 => &neighbours[..],
            _ => &policies[..],
        };
        for (name, make) in WHOLE {
            let want = plainly(MLP, ranks, make);
            for (policy_name, policy) in policies {
                let got = owned(MLP, ranks, make, policy.clone().one_owner(["**"]));
                // A third is rounded where the engine rounds it.
                let tolerance = if ranks == 3 { 2e-5 } else { 0.0 };
                eprintln!("{name}, {policy_name}, {ranks} ranks");
                assert_close(&got, &want, tolerance);
            }
        }
    }
}

/// A parameter that every rank holds whole is the same to the optimizer as before, and needs no owner.
#[test]
fn replicas_take_any_optimizer() {
    for ranks in [1, 2, 4] {
        for (name, make) in WHOLE {
            let policy = blocks().strategy(Strategy::NoShard);
            let got = owned(MLP, ranks, make, policy);
            assert_eq!(got.params, plainly(MLP, ranks, make).params, "{name}");
        }
    }
}

#[test]
fn convolutions_keep_their_four_dims() {
    let optimizers: [(&str, Make); 3] = [
        ("adafactor", || AdafactorConfig::new().init()),
        ("lamb", || LambConfig::new().init()),
        ("clipping by norm", clipping),
    ];
    for ranks in [2, 4] {
        for (name, make) in optimizers {
            let policy = ShardPolicy::new().one_owner(["convs", "**.weight"]);
            let (got, want) = (
                owned(CONV_NET, ranks, make, policy),
                plainly(CONV_NET, ranks, make),
            );
            assert_eq!(got.params, want.params, "{name} on {ranks} ranks");
        }
    }
}

fn hybrid<M: Module + 'static>(
    case: Case<M>,
    world: &ProcessGroup,
    layout: [usize; 2],
) -> Result<M, Error> {
    let layout = Mesh::new([("replicate", layout[0]), ("shard", layout[1])])?;
    let mesh = ProcessMesh::new(world, layout)?;
    let model = seeded_by_rank((case.build)(&device()), world.rank());
    let policy = blocks().one_owner(["**"]).replicate_axis("replicate");
    fully_shard(model, &mesh, policy)
}

#[test]
fn each_replica_has_its_own_owners() {
    for layout in [[2, 2], [2, 1], [1, 2]] {
        for (name, make) in WHOLE {
            let ranks = layout[0] * layout[1];
            let got = joined(&on_ranks(ranks, move |world| {
                let model = hybrid(MLP, &world, layout)?;
                stepped(model, MLP, world.rank(), make)
            }));
            // The sums over shards and replicas are computed in a different order than in a line.
            eprintln!("{name}, {layout:?}");
            assert_close(&got, &plainly(MLP, ranks, make), 2e-5);
        }
    }
}

/// The memory and traffic of one rank.
struct Seen {
    /// Elements of each matrix, by path.
    elements: Vec<(String, usize)>,
    /// Bytes of a step's gathers and reductions.
    bytes: [u64; 3],
    held_bytes: usize,
}

fn seen(world: &ProcessGroup, policy: ShardPolicy) -> Result<Seen, Error> {
    let device = device();
    let model = build(MLP, world, &device, policy)?;
    let before = world.counts();
    drop(backward(model.loss(world.rank(), 0, &device), &model)?);
    let counts = since(world, &before);
    let kinds = [
        OperationKind::AllGather,
        OperationKind::ReduceScatter,
        OperationKind::AllReduce,
    ];
    let state = local_state(&model)?;
    let elements = state.iter().filter_map(|tensor| match &tensor.part {
        LocalPart::Shard { range, .. } => Some((tensor.path.clone(), range.len())),
        _ => None,
    });
    Ok(Seen {
        elements: elements.collect(),
        bytes: kinds.map(|kind| counts.of(kind).bytes),
        held_bytes: wrap_plan(&model)?.held(),
    })
}

#[test]
fn an_owner_holds_everything_and_no_more_bytes_travel() {
    for ranks in 1..=4 {
        let run = |policy: ShardPolicy| on_ranks(ranks, move |world| seen(&world, policy.clone()));
        let owned = run(blocks().one_owner(["**"]));
        let cut = run(blocks());
        for (index, (path, _)) in owned[0].elements.iter().enumerate() {
            let of = |seen: &Seen| seen.elements[index].1;
            let held: Vec<_> = owned.iter().map(of).collect();
            let whole: usize = cut.iter().map(of).sum();
            let holders = held.iter().filter(|held| **held > 0).count();
            assert_eq!((holders, held.iter().sum()), (1, whole), "{path}: {held:?}");
        }
        for kind in 0..3 {
            let sum = |seen: &[Seen]| seen.iter().map(|seen| seen.bytes[kind]).sum::<u64>();
            assert_eq!(sum(&owned), sum(&cut), "{ranks} ranks");
        }
        let held: Vec<_> = owned.iter().map(|seen| seen.held_bytes).collect();
        let mean = held.iter().sum::<usize>() as f64 / ranks as f64;
        let largest = *held.iter().max().expect("a rank") as f64;
        assert!(largest <= 1.35 * mean, "{held:?}");
    }
}

#[test]
fn only_owners_have_gradients() {
    let found = on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks().one_owner(["blocks.*.up"]))?;
        assert_eq!(owner_groups(&model).len(), 1);
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        Ok(params_with_gradient(&model, &gradients))
    });
    let of = |paths: &[String], name: &str| paths.iter().filter(|path| path.contains(name)).count();
    assert_eq!(of(&found[0], "up.weight") + of(&found[1], "up.weight"), 3);
    assert_eq!([of(&found[0], "up.bias"), of(&found[1], "up.bias")], [3, 3]);
    assert_eq!(
        [of(&found[0], "down.weight"), of(&found[1], "down.weight")],
        [3, 3]
    );
}

#[test]
fn norms_count_owned_parameters_once() {
    let norm = |policy: ShardPolicy| {
        let norms = on_ranks(3, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
            Ok(clip_grad_norm(&model, gradients, Clip::to(0.1))?.total_norm)
        });
        assert_eq!(norms[0], norms[1]);
        norms[0]
    };
    let (owned, cut) = (norm(blocks().one_owner(["**"])), norm(blocks()));
    assert!((owned - cut).abs() <= 1e-6 * cut, "{owned} and {cut}");
}

#[test]
fn deferred_gradients_reach_the_owner() {
    let run = |policy: ShardPolicy| {
        joined(&on_ranks(2, move |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, policy.clone())?;
            let mut optimizer = SgdConfig::new().init();
            for step in 0..2 {
                no_sync(&model, || {
                    backward(model.loss(world.rank(), 2 * step, &device), &model)
                })??;
                let loss = model.loss(world.rank(), 2 * step + 1, &device);
                let gradients = backward(loss, &model)?;
                model = optimizer.step(1e-1, model, gradients);
            }
            Ok(Outcome {
                losses: Vec::new(),
                params: whole_params(Mlp::new(&device), &model),
            })
        }))
    };
    let (owned, cut) = (run(blocks().one_owner(["**"])), run(blocks()));
    assert_eq!(owned.params, cut.params);
}

/// In 16 bits each owner has the same gradient as its shards would have.
#[test]
fn precision_matches_shards() {
    let policy = || blocks().precision(Precision::new(burn::tensor::FloatDType::BF16));
    let owned = owned(MLP, 2, adamw, policy().one_owner(["**"]));
    let cut = self::owned(MLP, 2, adamw, policy());
    assert_eq!(owned.params, cut.params);
}

#[test]
fn parameters_still_sharded_are_rejected_with_a_remedy() {
    on_ranks(2, |world| {
        let model = build(MLP, &world, &device(), blocks().one_owner(["blocks.*"]))?;
        let error =
            check_elementwise(&model, &LambConfig::new().init()).expect_err("the embedding");
        let message = error.to_string();
        assert!(message.contains("`embed.weight`"), "{message}");
        assert!(message.contains("one_owner"), "{message}");
        let model = build(MLP, &world, &device(), blocks().one_owner(["**"]))?;
        check_elementwise(&model, &LambConfig::new().init())
    });
    let message = panic_of(|| {
        on_ranks(2, |world| {
            build(MLP, &world, &device(), blocks().one_owner(["blokcs.*"])).map(drop)
        })
    });
    assert!(message.contains("blokcs.*"), "{message}");
}

/// A module that was frozen, recorded, loaded and trained again is owned as before.
#[test]
fn records_and_other_maps_keep_the_owners() {
    let losses = on_ranks(2, |world| {
        let device = device();
        let owned = || build(MLP, &world, &device, blocks().one_owner(["**"]));
        let (record, before) = {
            let model: Mlp = owned()?;
            let before = whole_params(Mlp::new(&device), &model);
            (model.into_record(), before)
        };
        let loaded = owned()?.load_record(record).freeze().unfreeze();
        let model = loaded.valid().train();
        drop(loaded);
        assert_eq!(whole_params(Mlp::new(&device), &model), before);
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let model = muon().step(1e-2, model, gradients);
        Ok(Outcome {
            losses: Vec::new(),
            params: whole_params(Mlp::new(&device), &model),
        })
    });
    joined(&losses);
}
