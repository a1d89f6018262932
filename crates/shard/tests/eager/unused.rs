//! Parameters used twice, on only some ranks, or never; frozen ones; children first; buffers.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{OperationCounts, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, catch, evaluate, fully_shard, memory,
    params_with_gradient, units,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, joined, on_ranks, optimizer, panic_of,
    plainly, plainly_stepped, ready, seeded, seeded_by_rank, sharded, whole_params,
};
use super::hybrid;
use super::nets::{ConvNet, MLP, Mlp, input};

/// Four layers; ranks use different ones.
#[derive(Module, Debug)]
pub(crate) struct Routed {
    pub(crate) layers: Vec<Linear>,
    pub(crate) head: Linear,
}

impl Routed {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            layers: (0..4)
                .map(|_| LinearConfig::new(5, 5).init(device))
                .collect(),
            head: LinearConfig::new(5, 3).init(device),
        }
    }

    pub(crate) fn through(
        &self,
        layers: &[usize],
        rank: usize,
        step: usize,
        device: &Device,
    ) -> Tensor<1> {
        let mut x = input([2, 5], rank, step, device);
        for &layer in layers {
            x = self.layers[layer].forward(x);
        }
        self.head.forward(x).powf_scalar(2.0).mean()
    }

    /// Rank 0 skips layer 1, rank 1 skips layer 2 and uses layer 0 twice, and no rank uses layer 3.
    fn unevenly(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let layers: &[usize] = match rank {
            0 => &[0, 2],
            1 => &[0, 1, 0],
            _ => &[0, 1, 2],
        };
        self.through(layers, rank, step, device)
    }

    /// All layers, and then the first alone.
    fn twice(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        self.through(&[0, 1, 2, 3], rank, step, device) + self.through(&[0], rank, step + 1, device)
    }

    /// The last rank uses nothing but the first layer.
    fn barely(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        match rank {
            0 => self.through(&[0, 1, 2, 3], rank, step, device),
            _ => {
                let x = input([2, 5], rank, step, device);
                self.layers[0].forward(x).powf_scalar(2.0).mean()
            }
        }
    }
}

pub(crate) const UNEVEN: Case<Routed> = Case {
    build: Routed::new,
    loss: Routed::unevenly,
};

pub(crate) const TWICE: Case<Routed> = Case {
    build: Routed::new,
    loss: Routed::twice,
};

pub(crate) const BARE: Case<Routed> = Case {
    build: Routed::new,
    loss: Routed::barely,
};

fn layers() -> ShardPolicy {
    ShardPolicy::new().units(["layers.*"])
}

/// What an earlier backward has left of units that the last one does not use.
#[test]
fn the_last_backward_returns_gradients_of_units_it_does_not_use() {
    for layout in [[1, 1], [1, 3], [2, 2], [3, 1]] {
        for policy in [layers(), layers().strategy(Strategy::NoShard)] {
            let ranks = layout[0] * layout[1];
            let outcomes = on_ranks(ranks, move |world| {
                let device = device();
                let model = hybrid::build(TWICE, &world, layout, policy.clone())?;
                let handles = units(&model)?;
                for unit in &handles {
                    unit.set_is_last_backward(false)?;
                }
                let all = model.through(&[0, 1, 2, 3], world.rank(), 0, &device);
                assert_eq!(backward(all, &model)?.len(), 0);
                handles[0].set_is_last_backward(true)?;
                let one = model.through(&[0], world.rank(), 1, &device);
                let gradients = backward(one, &model)?;
                let model = optimizer().step(1e-2, model, gradients);
                let params = whole_params((TWICE.build)(&device), &model);
                Ok(Outcome {
                    losses: Vec::new(),
                    params,
                })
            });
            let want = plainly_stepped(TWICE, ranks);
            assert_close(&joined(&outcomes), &want, 1e-5);
        }
    }
}

#[test]
fn ranks_may_use_different_units() {
    for ranks in 1..=4 {
        for prefetch in 0..2 {
            let policy = layers().prefetch(prefetch);
            let got = sharded(UNEVEN, ranks, 6, policy.clone());
            assert_close(&got, &plainly(UNEVEN, ranks, 6), 1e-5);
            let got = sharded(BARE, ranks, 6, policy);
            assert_close(&got, &plainly(BARE, ranks, 6), 1e-5);
        }
    }
}

/// Ranks use different units, one of them twice, none at all, or evaluate more often than others.
#[test]
fn evaluation_takes_any_route() {
    let policies = || {
        [
            layers(),
            layers().reshard_root(true),
            layers().whole_below(20),
            layers().strategy(Strategy::ShardGradOp),
            ShardPolicy::new().unit_of(["layers.0", "head"]),
            layers().one_owner(["layers.1"]),
        ]
    };
    for ranks in 1..=4 {
        for policy in policies() {
            on_ranks(ranks, move |world| {
                let device = device();
                let inner = device.clone().without_autodiff();
                let plain = seeded(Routed::new(&inner), SEED);
                let model = build(UNEVEN, &world, &device, policy.clone())?;
                let rank = world.rank();
                let of = |model: &Routed, step: usize| -> Vec<f32> {
                    let unevenly = model.unevenly(rank, step, &inner).into_scalar::<f32>();
                    let barely = model.barely(rank, step, &inner).into_scalar::<f32>();
                    vec![unevenly, barely]
                };
                // As many batches as the rank's number: rank 0 has none.
                let all = |model: &Routed| (0..rank).flat_map(|step| of(model, step)).collect();
                let got: Vec<f32> = evaluate(&model, all)?;
                let want: Vec<f32> = all(&plain);
                assert_eq!(got, want, "rank {rank} of {ranks}");
                assert_eq!(memory(&model)?.unsharded_live, 0);
                // With values of several generations in one unit.
                let mut model = model;
                let kept = model.head.clone();
                model.head = model.head.no_grad();
                assert_eq!(evaluate(&model, all)?, want, "rank {rank} of {ranks}");
                drop(kept);
                // Training continues with the module.
                let gradients = backward(model.unevenly(rank, 0, &device), &model)?;
                assert!(!params_with_gradient(&model, &gradients).is_empty());
                Ok(())
            });
        }
    }
}

/// One exchange before each gather and one at the end; ranks on one route gather each unit once.
#[test]
fn ranks_on_one_route_gather_together() {
    on_ranks(3, |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let model = build(UNEVEN, &world, &device, layers())?;
        let before = world.counts();
        evaluate(&model, |model| {
            model
                .through(&[0, 1, 2, 3], 0, 0, &inner)
                .into_scalar::<f32>()
        })?;
        let since = world.counts().since(&before);
        assert_eq!(since.of(OperationKind::AllGather).operations, 5);
        assert_eq!(since.of(OperationKind::Exchange).operations, 5 + 1);
        Ok(())
    });
}

#[test]
fn evaluations_use_only_their_own_module_and_do_not_nest() {
    on_ranks(2, |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let model = build(UNEVEN, &world, &device, layers())?;
        let loss = |model: &Routed, device: &Device| {
            let layer = world.rank();
            model.through(&[layer], 0, 0, device).into_scalar::<f32>()
        };
        let inside = |what: &dyn Fn(&Routed) -> Result<(), Error>| {
            let nested = evaluate(&model, what);
            nested.and_then(|got| got).expect_err("refused").to_string()
        };
        let nested = inside(&|outer| evaluate(outer, |_| ()));
        assert!(nested.contains("in no other evaluation"), "{nested}");
        let trained = inside(&|_| catch(|| loss(&model, &device)).map(drop));
        assert!(
            trained.contains("part of the module being trained"),
            "{trained}"
        );
        let other = model.clone().no_grad().valid();
        let other = inside(&|_| catch(|| loss(&other, &inner)).map(drop));
        assert!(other.contains("of another copy"), "{other}");
        // A copy with the module's values is equivalent.
        let copy = model.valid();
        let got = evaluate(&model, |_| loss(&copy, &inner))?;
        assert_eq!(evaluate(&model, |model| loss(model, &inner))?, got);
        copy.through(&[0, 1], 0, 0, &inner);
        // Ranks may also gather units by hand as they like.
        evaluate(&model, |model| {
            let handles = units(model)?;
            handles[1 + world.rank()].unshard()?.wait()?;
            loss(model, &inner);
            Ok::<_, Error>(())
        })??;
        assert!(
            evaluate(&Routed::new(&device), |_| ()).is_err(),
            "not sharded"
        );
        Ok(())
    });
}

#[test]
fn a_rank_that_leaves_an_evaluation_with_an_error_takes_the_others_along() {
    on_ranks(3, |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let model = build(UNEVEN, &world, &device, layers())?;
        let evaluated = evaluate(&model, |evaluated| {
            let loss = evaluated
                .unevenly(world.rank(), 0, &inner)
                .into_scalar::<f32>();
            if world.rank() == 1 {
                // Unwinds with the error of this crate.
                drop(model.through(&[0], 0, 0, &device));
            }
            loss
        });
        let error = evaluated.expect_err("left").to_string();
        let words = match world.rank() {
            1 => "part of the module being trained",
            _ => "no longer evaluated by rank 1, which failed",
        };
        assert!(error.contains(words), "{error}");
        // All may continue.
        let loss = evaluate(&model, |model| {
            model.unevenly(world.rank(), 0, &inner).into_scalar::<f32>()
        });
        loss.map(drop)
    });
}

#[test]
fn replicas_of_shards_are_evaluated_by_any_route() {
    on_ranks(4, |world| {
        let device = device();
        let inner = device.clone().without_autodiff();
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh)?;
        let model = seeded_by_rank(Routed::new(&device), world.rank());
        let model = fully_shard(model, &mesh, layers().replicate_axis("replicate"))?;
        let plain = seeded(Routed::new(&inner), SEED);
        let route = &[0, 1, 2, 3][world.rank()..];
        let of = |model: &Routed| {
            model
                .through(route, world.rank(), 0, &inner)
                .into_scalar::<f32>()
        };
        assert_eq!(evaluate(&model, of)?, of(&plain));
        Ok(())
    });
}

/// There is no backward in which ranks would catch up with the others.
#[test]
fn in_evaluation_other_units_are_an_error() {
    let message = panic_of(|| {
        on_ranks(2, |world| {
            let device = device();
            let model = build(UNEVEN, &world, &device, layers())?.valid();
            let inner = device.without_autodiff();
            let evaluated = catch(|| model.unevenly(world.rank(), 0, &inner).into_scalar::<f32>());
            evaluated.map(drop)
        })
    });
    assert!(message.contains("layers.1 unshard"), "{message}");
    assert!(message.contains("layers.2 unshard"), "{message}");
}

#[test]
fn a_loss_without_any_unit_still_takes_part() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(UNEVEN, &world, &device, layers())?;
        let touched = model.through(&[0], 0, 0, &device);
        let loss = match world.rank() {
            0 => touched,
            // This loss does not depend on the model.
            _ => Tensor::<1>::ones([1], &device)
                .require_grad()
                .mul_scalar(2.0),
        };
        let number = params_with_gradient(&model, &backward(loss, &model)?).len();
        assert_eq!(number, 4, "weights and biases of layer 0 and of the head");
        Ok(())
    });
}

#[test]
fn units_unused_by_all_ranks_have_no_gradient() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(UNEVEN, &world, &device, layers())?;
        let loss = model.through(&[0, 2], world.rank(), 0, &device);
        let gradients = backward(loss, &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), 6);
        Ok(())
    });
}

fn half_frozen(device: &Device) -> Mlp {
    let mut model = Mlp::new(device);
    model.blocks[1] = model.blocks[1].clone().freeze();
    model.head = model.head.freeze();
    model
}

const FROZEN: Case<Mlp> = Case {
    build: half_frozen,
    loss: Mlp::loss,
};

#[test]
fn frozen_units_are_gathered_and_not_reduced() {
    for ranks in 1..=3 {
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let got = sharded(FROZEN, ranks, 5, policy);
        let want = plainly(FROZEN, ranks, 5);
        assert_close(&got, &want, 1e-5);
        for (counts, frozen) in of_the_third_step(ranks) {
            let of = |kind| counts.of(kind);
            // The root and three blocks, and the blocks again in backward; frozen weights pass gradients on.
            assert_eq!(of(OperationKind::AllGather).operations, 7);
            // Only the embedding of the root, and the two blocks that are not frozen.
            assert_eq!(of(OperationKind::ReduceScatter).operations, 3);
            let trainable = 4 * (11 * 15 + 2 * 3 * 15 * 7);
            assert_eq!(of(OperationKind::ReduceScatter).bytes, trainable);
            assert_eq!(frozen, 0, "gradients of frozen parameters");
        }
    }
}

/// Operations of the third step of the half frozen module, and how many frozen parameters have a gradient.
fn of_the_third_step(ranks: usize) -> Vec<(OperationCounts, usize)> {
    on_ranks(ranks, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let mut model = build(FROZEN, &world, &device, policy)?;
        let mut optim = optimizer();
        let mut seen = (OperationCounts::default(), 0);
        for step in 0..3 {
            let before = world.counts();
            let loss = model.loss(world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            let paths = params_with_gradient(&model, &gradients);
            let is_frozen =
                |path: &&String| path.starts_with("blocks.1.") || path.starts_with("head.");
            let frozen = paths.iter().filter(is_frozen).count();
            seen = (world.counts().since(&before), frozen);
            model = optim.step(1e-2, model, gradients);
        }
        Ok(seen)
    })
}

#[test]
fn parents_shard_what_their_children_left() {
    let want = plainly(MLP, 2, 5);
    let outcomes = on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let mut model = seeded_by_rank(Mlp::new(&device), world.rank());
        let mut blocks = Vec::new();
        for block in model.blocks {
            blocks.push(fully_shard(
                block,
                &mesh,
                ShardPolicy::new().reshard_root(true),
            )?);
        }
        model.blocks = blocks;
        let mut model = fully_shard(model, &mesh, ShardPolicy::new())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..5 {
            let loss = model.loss(world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let params = whole_params(Mlp::new(&device), &model);
        Ok(Outcome { losses, params })
    });
    assert_close(&joined(&outcomes), &want, 1e-5);
}

/// The running means of a plain module after forwards on only `rank`'s batches.
fn running_means(model: &ConvNet, rank: usize, device: &Device) -> Vec<Vec<f32>> {
    for step in 0..3 {
        drop(model.loss(rank, step, device));
    }
    means_of(model)
}

fn means_of(model: &ConvNet) -> Vec<Vec<f32>> {
    let means = model.norms.iter().map(|norm| {
        let mean = norm.running_mean.value_sync().into_data();
        mean.try_to_vec::<f32>().expect("f32")
    });
    means.collect()
}

#[test]
fn clones_do_not_share_running_states() {
    let device = device();
    let built = || ready(|| seeded(ConvNet::new(&device), SEED));
    let want: Vec<_> = (0..3)
        .map(|rank| running_means(&built(), rank, &device))
        .collect();
    // One module, cloned into all ranks: its running states are shared until it is sharded.
    let model = built();
    let got = on_ranks(3, move |world| {
        let device = super::bench::device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 3)?)?;
        let policy = ShardPolicy::new().units(["convs.*"]);
        let model = fully_shard(model.clone(), &mesh, policy)?;
        Ok(running_means(&model, world.rank(), &device))
    });
    for (got, want) in got.iter().zip(&want) {
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() <= 1e-6, "{got}, expected {want}");
        }
    }
    assert_ne!(got[0], got[1]);
}
