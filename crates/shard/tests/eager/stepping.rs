//! The optimizer's steps in backward, compared bit for bit with steps after it.

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamWConfig, LionConfig, ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_shard::{
    Audit, Cut, Error, ReduceGroup, ShardPolicy, Strategy, backward, backward_and_step, catch,
    into_record, memory, no_sync, num_audited, recompute, units,
};

use super::bench::{
    Case, Outcome, Way, assert_close, assert_same, build, device, joined, on_ranks, optimizer,
    params, plainly, since, train_by, whole_params,
};
use super::hybrid;
use super::nets::{CONV_NET, MLP, Mlp, RECURRENT, input};
use super::recompute::{around_all, around_units, inside_units};
use super::unused::{BARE, Routed, TWICE, UNEVEN};

type Make = fn() -> ModuleOptimizer;

const OPTIMIZERS: [(&str, Make); 5] = [
    ("sgd with momentum", || {
        let momentum = MomentumConfig::new().with_momentum(0.9);
        SgdConfig::new().with_momentum(Some(momentum)).init()
    }),
    ("adamw", || AdamWConfig::new().init()),
    ("adagrad", || AdaGradConfig::new().init()),
    ("rmsprop", || RmsPropConfig::new().init()),
    ("lion", || LionConfig::new().init()),
];

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn layers() -> ShardPolicy {
    ShardPolicy::new().units(["layers.*"])
}

/// Trains one way on `ranks` ranks.
fn trained<M: Module + 'static>(
    way: Way,
    case: Case<M>,
    ranks: usize,
    steps: usize,
    policy: ShardPolicy,
    make: Make,
) -> Outcome {
    joined(&on_ranks(ranks, move |world| {
        let device = device();
        let model = build(case, &world, &device, policy.clone())?;
        let rank = world.rank();
        let plain = (case.build)(&device);
        train_by(way, model, make(), steps, plain, |model, step| {
            (case.loss)(model, rank, step, &device)
        })
    }))
}

/// Asserts that both ways give the same bits, and the results of plain Burn.
fn agree<M: Module + 'static>(case: Case<M>, ranks: usize, policy: ShardPolicy) {
    let steps = 5;
    let run = |way| trained(way, case, ranks, steps, policy.clone(), optimizer);
    let got = run(Way::InBackward);
    assert_same(&got, &run(Way::AfterBackward), &format!("{ranks} ranks"));
    assert_close(&got, &plainly(case, ranks, steps), 1e-5);
}

#[test]
fn every_optimizer_steps_in_backward_as_after_it() {
    for (name, make) in OPTIMIZERS {
        for ranks in 1..=4 {
            let run = |way| trained(way, MLP, ranks, 5, blocks(), make);
            assert_same(&run(Way::InBackward), &run(Way::AfterBackward), name);
        }
    }
}

#[test]
fn every_policy_steps_in_backward_as_after_it() {
    for policy in [
        blocks().strategy(Strategy::ShardGradOp),
        blocks().strategy(Strategy::NoShard),
        blocks().cut(Cut::Dims),
        blocks().shard_vectors(true),
        blocks().one_owner(["**"]),
        blocks().whole_below(1000),
        blocks().prefetch(0),
        blocks().prefetch(2),
        blocks().reshard_root(true),
        blocks().offload_to(Device::flex()),
        blocks().reduce_group(ReduceGroup::Own),
        blocks().reshard_after_forward_to(1),
        blocks().audit(Audit::EveryStep),
        blocks().gradient_hook(|_, gradient| gradient),
        ShardPolicy::new(),
    ] {
        for ranks in [1, 3] {
            agree(MLP, ranks, policy.clone());
        }
    }
    for ranks in 1..=4 {
        agree(CONV_NET, ranks, ShardPolicy::new().units(["convs.*"]));
        agree(RECURRENT, ranks, layers());
    }
}

#[test]
fn replicas_step_in_backward_as_after_it() {
    for layout in [[2, 1], [1, 2], [2, 2]] {
        let run = |way| {
            joined(&on_ranks(layout[0] * layout[1], move |world| {
                let model = hybrid::build(MLP, &world, layout, blocks())?;
                let (rank, plain) = (world.rank(), (MLP.build)(&device()));
                train_by(way, model, optimizer(), 5, plain, |model, step| {
                    (MLP.loss)(model, rank, step, &device())
                })
            }))
        };
        let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
        assert_same(&got, &want, &format!("{layout:?}"));
    }
}

#[test]
fn regions_step_in_backward_as_after_it() {
    for loss in [around_units, inside_units, around_all] {
        for ranks in 1..=3 {
            for prefetch in 0..2 {
                let case = Case { loss, ..MLP };
                agree(case, ranks, blocks().prefetch(prefetch));
            }
        }
    }
}

#[test]
fn units_that_some_ranks_skip_or_use_twice_step_once() {
    for case in [UNEVEN, TWICE, BARE] {
        for ranks in 1..=4 {
            for prefetch in 0..2 {
                agree(case, ranks, layers().prefetch(prefetch));
            }
        }
    }
}

/// The loss of a route through the layers.
type Route = fn(&Routed, &[usize], usize, usize, &Device) -> Tensor<1>;

/// Routes through the layers that differ by rank and step: the recorded order often lacks operations.
fn wandering(route: Route, model: &Routed, rank: usize, step: usize) -> Tensor<1> {
    let device = &device();
    let mut seed = (rank * 7919 + step * 104_729 + 13) as u64;
    let mut next = |below: usize| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(99);
        (seed >> 33) as usize % below
    };
    let mut loss = None;
    for _ in 0..1 + next(2) {
        let layers: Vec<_> = (0..next(5)).map(|_| next(4)).collect();
        let part = route(model, &layers, rank, step, device);
        loss = Some(loss.map_or(part.clone(), |sum| sum + part));
    }
    loss.expect("a part")
}

/// Each layer in its own region.
fn in_regions(
    model: &Routed,
    layers: &[usize],
    rank: usize,
    step: usize,
    device: &Device,
) -> Tensor<1> {
    let mut x = input([2, 5], rank, step, device);
    for &layer in layers {
        let layer = &model.layers[layer];
        x = recompute(layer, x, |layer: &Linear, x| layer.forward(x));
    }
    model.head.forward(x).powf_scalar(2.0).mean()
}

#[test]
fn steps_that_leave_the_recorded_order_step_every_unit_once() {
    for (ranks, route) in (1..=4).flat_map(|ranks| {
        let routes: [Route; 2] = [Routed::through, in_regions];
        routes.map(|route| (ranks, route))
    }) {
        for replicas in [1, 2] {
            if ranks % replicas != 0 {
                continue;
            }
            let run = |way: Way| {
                joined(&on_ranks(ranks, move |world| {
                    let layout = [replicas, ranks / replicas];
                    let policy = layers().prefetch(replicas - 1).audit(Audit::EveryStep);
                    let model = hybrid::build(UNEVEN, &world, layout, policy)?;
                    let (rank, plain) = (world.rank(), Routed::new(&device()));
                    // Each route is taken three times: the third follows the order of the second.
                    train_by(way, model, optimizer(), 45, plain, |model, step| {
                        wandering(route, model, rank, step / 3)
                    })
                }))
            };
            let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
            assert_same(&got, &want, &format!("{ranks} ranks, {replicas} replicas"));
        }
    }
}

/// All units of the chain step before backward ends, also in the first step: their gradients never exist together.
#[test]
fn gradients_of_one_unit_exist_at_a_time() {
    for prefetch in 0..2 {
        for way in [Way::InBackward, Way::AfterBackward] {
            for peaks in on_ranks(2, move |world| {
                let device = device();
                let mut model = build(MLP, &world, &device, blocks().prefetch(prefetch))?;
                let mut optim = optimizer();
                let mut peaks = Vec::new();
                for step in 0..4 {
                    burn_fsdp_shard::reset_peak(&model)?;
                    let loss = (MLP.loss)(&model, world.rank(), step, &device);
                    model = way.step(loss, model, &mut optim)?;
                    peaks.push(memory(&model)?.gradients_peak);
                }
                let handles = units(&model)?;
                let of = |unit: &burn_fsdp_shard::UnitHandle| unit.memory().parameters;
                let all: usize = handles.iter().map(of).sum();
                Ok((peaks, all, handles.iter().map(of).max().unwrap_or(0)))
            }) {
                let (peaks, all, largest) = peaks;
                for peak in &peaks {
                    match way {
                        Way::InBackward => assert!(*peak <= 2 * largest, "{peak} of {all}"),
                        Way::AfterBackward => assert_eq!(*peak, all),
                    }
                }
                assert!(2 * largest < all, "the bound can fail");
            }
        }
    }
}

#[test]
fn the_operations_stay_the_same() {
    for loss in [Mlp::loss, around_units, inside_units] {
        let of_steps = |way: Way| {
            on_ranks(3, move |world| {
                let device = device();
                let mut model = build(MLP, &world, &device, blocks().audit(Audit::EveryStep))?;
                let mut optim = optimizer();
                let mut counts = Vec::new();
                for step in 0..4 {
                    let before = world.counts();
                    model =
                        way.step(loss(&model, world.rank(), step, &device), model, &mut optim)?;
                    counts.push(since(&world, &before));
                }
                let order = burn_fsdp_shard::order(&model)?.to_string();
                Ok((counts, order, num_audited(&model)?))
            })
        };
        let got = of_steps(Way::InBackward);
        assert_eq!(got, of_steps(Way::AfterBackward));
        assert_eq!(got[0].2, 4, "all steps are audited");
    }
}

#[test]
fn micro_batches_are_stepped_with_the_last_one() {
    for ranks in 1..=3 {
        let run = |way: Way| {
            joined(&on_ranks(ranks, move |world| {
                let device = device();
                let mut model = build(MLP, &world, &device, blocks())?;
                let mut optim = optimizer();
                for step in 0..4 {
                    let loss = |model: &Mlp, micro: usize| {
                        (MLP.loss)(model, 10 * micro + world.rank(), step, &device)
                    };
                    let first = no_sync(&model, || backward(loss(&model, 0), &model))??;
                    assert!(first.is_empty());
                    let last = loss(&model, 1);
                    model = way.step(last, model, &mut optim)?;
                }
                let params = whole_params((MLP.build)(&device), &model);
                Ok(Outcome {
                    losses: Vec::new(),
                    params,
                })
            }))
        };
        let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
        assert_same(&got, &want, "micro-batches");
    }
}

#[test]
fn a_backward_that_keeps_its_gradients_is_refused() {
    let refused = |prepare: fn(&Mlp) -> Result<(), Error>| {
        let messages = on_ranks(2, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, blocks())?;
            prepare(&model)?;
            let loss = (MLP.loss)(&model, world.rank(), 0, &device);
            let mut optim = optimizer();
            let refused = backward_and_step(loss, model, &mut optim, 1e-2);
            Ok(refused.err().map(|error| error.to_string()))
        });
        let message = messages[0].clone().expect("an error");
        assert!(message.contains("unit `root`"), "{message}");
        assert!(
            message.contains("`backward_and_step` for the last one"),
            "{message}"
        );
    };
    refused(|model| {
        let units = units(model)?;
        let mut units = units.iter();
        units.try_for_each(|unit| unit.set_requires_gradient_sync(false))
    });
    refused(|model| units(model)?[0].set_is_last_backward(false));
}

/// Ranks may step in different ways.
#[test]
fn ranks_may_mix_both_ways() {
    let outcomes = on_ranks(3, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let way = match world.rank() {
            1 => Way::AfterBackward,
            _ => Way::InBackward,
        };
        let (rank, plain) = (world.rank(), (MLP.build)(&device));
        train_by(way, model, optimizer(), 5, plain, |model, step| {
            (MLP.loss)(model, rank, step, &device)
        })
    });
    assert_close(&joined(&outcomes), &plainly(MLP, 3, 5), 1e-5);
}

/// A clone keeps its values, and a module with a unit in several generations steps like any other.
#[test]
fn clones_and_partly_changed_units_keep_their_values() {
    for ranks in 1..=2 {
        let run = |way: Way| {
            joined(&on_ranks(ranks, move |world| {
                let device = device();
                let mut model = build(MLP, &world, &device, blocks())?;
                let mut optim = optimizer();
                model.blocks[1].gate = model.blocks[1].gate.clone().no_grad();
                let mut kept = Vec::new();
                for step in 0..4 {
                    kept.push((model.clone(), model.valid()));
                    let loss = (MLP.loss)(&model, world.rank(), step, &device);
                    model = way.step(loss, model, &mut optim)?;
                }
                // A clone's forward gathers its own values.
                let loss = |(clone, _): &(Mlp, Mlp)| (MLP.loss)(clone, world.rank(), 0, &device);
                let losses = kept.iter().map(|kept| loss(kept).into_scalar::<f32>());
                let losses = losses.collect();
                let mut all = Vec::new();
                let kept = kept.into_iter().flat_map(|(clone, valid)| [clone, valid]);
                for copy in kept.chain([model]) {
                    let record = into_record(copy)?;
                    all.extend(params(&(MLP.build)(&device).load_record(record)));
                }
                Ok(Outcome {
                    losses,
                    params: all,
                })
            }))
        };
        let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
        assert_same(&got, &want, "clones");
    }
}

/// A graph whose values were stepped and freed cannot run backward any more.
#[test]
fn an_older_graph_of_freed_values_is_an_error() {
    let messages = on_ranks(1, |world| {
        let device = device();
        let loss = |model: &Mlp| (MLP.loss)(model, 0, 0, &device);
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = optimizer();
        model = backward_and_step(loss(&model), model, &mut optim, 1e-2)?;
        let old = loss(&model);
        // The engine gives up on the older forward here.
        backward(loss(&model), &model)?;
        let new = loss(&model);
        model = backward_and_step(new, model, &mut optim, 1e-2)?;
        let refused = catch(|| backward(old, &model)).and_then(|result| result);
        let message = refused.err().map(|error| error.to_string());
        backward_and_step(loss(&model), model, &mut optim, 1e-2)?;
        Ok(message)
    });
    let message = messages[0].clone().expect("an error");
    assert!(
        message.contains("`backward_and_step` has replaced"),
        "{message}"
    );
}

/// After an error in the middle of backward, the module is gone, and the optimizer keeps the state of stepped units.
#[test]
fn an_error_in_the_middle_consumes_the_module_on_all_ranks() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    let states = Arc::new(parking(Vec::new()));
    let fails = Arc::new(AtomicBool::new(false));
    let (seen, on) = (states.clone(), fails);
    let body = move |world: ProcessGroup| {
        let device = device();
        let rank = world.rank();
        let fails = on.clone();
        // The first rank's gradient of the first block is wrong: the other blocks have been stepped by then.
        let policy = blocks().gradient_hook(move |path, gradient| {
            if rank == 0 && path == "blocks.0.up.weight" && fails.load(Ordering::Relaxed) {
                gradient.slice(0..1)
            } else {
                gradient
            }
        });
        let mut model = build(MLP, &world, &device, policy)?;
        let mut optim: ModuleOptimizer = SgdConfig::new().init();
        for step in 0..2 {
            let loss = (MLP.loss)(&model, rank, step, &device);
            model = backward_and_step(loss, model, &mut optim, 1e-2)?;
        }
        world.barrier("before the fault")?;
        on.store(true, Ordering::Relaxed);
        world.barrier("set")?;
        let mut optim = optimizer();
        let loss = (MLP.loss)(&model, rank, 2, &device);
        let result = backward_and_step(loss, model, &mut optim, 1e-2);
        let error = result.err().map(|error| error.to_string());
        let of = |optim: ModuleOptimizer| optim.into_bytes().map_or(0, |bytes| bytes.len());
        let states = of(optim) - of(optimizer());
        seen.lock().expect("unpoisoned").push((rank, error, states));
        Ok::<_, Error>(())
    };
    let config = LaunchConfig::new(2).deadline(std::time::Duration::from_secs(30));
    launch(config, body).ok();
    let seen = states.lock().expect("unpoisoned").clone();
    assert_eq!(seen.len(), 2);
    for (rank, error, states) in seen {
        let error = error.expect("an error on each rank");
        assert!(rank == 1 || error.contains("blocks.0.up.weight"), "{error}");
        assert!(states > 0, "rank {rank} keeps the states of stepped units");
    }
}

fn parking<T>(value: T) -> std::sync::Mutex<T> {
    std::sync::Mutex::new(value)
}
