//! Forwards without autodiff: gathers ahead of their use, and their values.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{CommStage, OperationKind, ProcessGroup};
use burn_fsdp_shard::{Error, ShardPolicy, UnitHandle, backward, evaluate, memory, units};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::bench::{SEED, build, device, on_ranks, optimizer, plain_device, seeded};
use super::nets::{MLP, Mlp};
use super::unused::{Routed, UNEVEN};

/// The gathers of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gathers {
    number: usize,
    /// The maximum number in progress at once.
    most: usize,
}

/// Runs `body`, and counts its gathers.
fn counted(world: &ProcessGroup, body: impl FnOnce()) -> Gathers {
    world.start_recording(|| 0);
    body();
    let mut spans = world.end_recording();
    spans.sort_by_key(|span| span.start);
    let (mut now, mut counts) = (0, Gathers { number: 0, most: 0 });
    for span in spans
        .iter()
        .filter(|span| span.operation.kind == OperationKind::AllGather)
    {
        match span.stage {
            CommStage::Start => {
                now += 1;
                counts.number += 1;
            }
            _ => now -= 1,
        }
        counts.most = counts.most.max(now);
    }
    assert_eq!(now, 0, "every gather is waited for");
    counts
}

fn blocks(prefetch: usize) -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"]).prefetch(prefetch)
}

/// Counts the gathers of the first and the third forward of an evaluation, and of the first forward of the evaluation
/// after the next step.
fn of_three_forwards(
    ranks: usize,
    prefetch: usize,
    list: fn(&[UnitHandle]) -> Result<(), Error>,
) -> Vec<[Gathers; 3]> {
    on_ranks(ranks, move |world| {
        let (device, plain) = (device(), plain_device());
        let model = build(MLP, &world, &device, blocks(prefetch))?;
        list(&units(&model)?)?;
        let forward = |model: &Mlp, step| {
            counted(&world, || {
                drop(model.loss(world.rank(), step, &plain).into_data())
            })
        };
        let copy = model.valid();
        let first = forward(&copy, 0);
        forward(&copy, 1);
        let third = forward(&copy, 2);
        drop(copy);
        let gradients = backward(model.loss(world.rank(), 3, &device), &model)?;
        let model = optimizer().step(1e-2, model, gradients);
        let next = forward(&model.valid(), 4);
        assert_eq!(memory(&model)?.unsharded_live, 0);
        Ok([first, third, next])
    })
}

/// The root and three blocks are gathered. The root stays unsharded in one copy of the module. The first block is never
/// gathered ahead, and nothing is in the first forward of a copy.
#[test]
fn evaluation_gathers_ahead_along_its_last_forward() {
    for ranks in 2..=3 {
        for (prefetch, most) in [(0, 1), (1, 2), (2, 3), (3, 3)] {
            for got in of_three_forwards(ranks, prefetch, |_| Ok(())) {
                let got = got.map(|Gathers { number, most }| (number, most));
                assert_eq!(got, [(4, 1), (3, most), (4, 1)], "prefetch {prefetch}");
            }
        }
    }
}

#[test]
fn evaluation_gathers_what_the_program_lists() {
    let list = |handles: &[UnitHandle]| handles[1].set_forward_prefetch(&handles[2..]);
    for got in of_three_forwards(2, 0, list) {
        let got = got.map(|Gathers { number, most }| (number, most));
        assert_eq!(got, [(4, 1), (3, 3), (4, 1)]);
    }
}

/// A step of a program with forwards with and without autodiff.
#[derive(Debug, Clone)]
enum Action {
    /// A step with the loss of these layers.
    Train(Vec<usize>),
    /// A step in which only rank 0 uses the module.
    Apart(Vec<usize>),
    /// Rank 0 alone takes a copy of a layer, and keeps it.
    Part(usize),
    /// Takes a new copy to evaluate.
    Copy,
    /// The losses of these layers, on the last copy.
    Evaluate(Vec<Vec<usize>>),
    /// Reads a layer's weight only.
    Peek(usize),
}

fn program(seed: u64) -> Vec<Action> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut actions = Vec::new();
    for _ in 0..12 {
        let mut route = || -> Vec<usize> {
            let number = random.random_range(1..=5);
            (0..number).map(|_| random.random_range(0..4)).collect()
        };
        let (one, other) = (route(), route());
        actions.push(match random.random_range(0..10) {
            0 => Action::Train(one),
            1 => Action::Apart(one),
            2 | 3 => Action::Copy,
            4 => Action::Peek(one[0]),
            5 => Action::Part(one[0]),
            6 => Action::Evaluate(vec![one.clone(), one.clone(), one]),
            _ => Action::Evaluate(vec![one.clone(), other, one]),
        });
    }
    actions
}

/// Runs a program on the batches of all `ranks`, without sharding. Returns what it reads.
fn read_plainly(ranks: usize, program: &[Action]) -> Vec<f32> {
    let device = plain_device().autodiff();
    let mut model = seeded((UNEVEN.build)(&device), SEED);
    let mut optim = optimizer();
    let mut copy = model.valid();
    let mut read = Vec::new();
    for (step, action) in program.iter().enumerate() {
        match action {
            Action::Train(route) | Action::Apart(route) => {
                let part = |rank| model.through(route, rank, step, &device);
                let used = if let Action::Apart(_) = action {
                    1
                } else {
                    ranks
                };
                let sum = (0..used).map(part).reduce(|sum, part| sum + part);
                let loss = sum.expect("a rank").div_scalar(ranks as f32);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(1e-2, model, gradients);
            }
            _ => read.extend(read_by(action, &model, &mut copy, step)),
        }
    }
    read
}

/// Runs an action without autodiff. All ranks evaluate the batch of rank 0.
fn read_by(action: &Action, model: &Routed, copy: &mut Routed, step: usize) -> Vec<f32> {
    let sum = |tensor: Tensor<1>| tensor.sum().into_scalar::<f32>();
    match action {
        Action::Train(_) | Action::Apart(_) | Action::Part(_) => Vec::new(),
        Action::Copy => {
            *copy = model.valid();
            Vec::new()
        }
        Action::Evaluate(routes) => {
            let loss = |route: &Vec<usize>| copy.through(route, 0, step, &plain_device());
            routes.iter().map(|route| sum(loss(route))).collect()
        }
        Action::Peek(layer) => {
            let weight = copy.layers[*layer].weight.val();
            vec![sum(weight.reshape([-1]))]
        }
    }
}

/// Evaluation reads the values of its copy, whatever was gathered ahead for another copy or another route, and keeps
/// nothing that training does not use.
#[test]
fn gathers_ahead_do_not_change_values() {
    for seed in 0..32 {
        let ranks = 2 + seed as usize % 3;
        let want = read_plainly(ranks, &program(seed));
        for prefetch in 0..=3 {
            let outcomes = on_ranks(ranks, move |world| {
                let device = device();
                let policy = ShardPolicy::new()
                    .units(["layers.*"])
                    .reshard_root(seed % 2 == 0)
                    .prefetch(prefetch);
                let mut model: Routed = build(UNEVEN, &world, &device, policy)?;
                let mut optim = optimizer();
                let mut copy = model.valid();
                let (mut read, mut parts) = (Vec::new(), Vec::new());
                for (step, action) in program(seed).iter().enumerate() {
                    let loss = match action {
                        Action::Apart(_) if world.rank() > 0 => {
                            Some(Tensor::zeros([1], &device).require_grad() * 2.0)
                        }
                        Action::Train(route) | Action::Apart(route) => {
                            Some(model.through(route, world.rank(), step, &device))
                        }
                        _ => None,
                    };
                    if let Some(loss) = loss {
                        let gradients = backward(loss, &model)?;
                        model = optim.step(1e-2, model, gradients);
                    }
                    if let Action::Part(layer) = action
                        && world.rank() == 0
                    {
                        parts.push(model.layers[*layer].valid());
                    }
                    read.extend(read_by(action, &model, &mut copy, step));
                }
                drop((copy, parts));
                let loss = model.through(&[3], world.rank(), 0, &device);
                drop(backward(loss, &model)?);
                Ok((read, memory(&model)?.unsharded_live))
            });
            for (read, live) in outcomes {
                assert_eq!(live, 0, "seed {seed}, prefetch {prefetch}");
                assert_eq!(read.len(), want.len());
                for (got, want) in read.iter().zip(&want) {
                    let is_close = (got - want).abs() <= 1e-5 * want.abs().max(1.0);
                    assert!(
                        is_close,
                        "seed {seed}, prefetch {prefetch}: {got}, not {want}"
                    );
                }
            }
        }
    }
}

/// Ranks may take different routes in `evaluate`, so no rank can know which unit comes next.
#[test]
fn evaluation_by_different_routes_gathers_nothing_ahead() {
    let route = |rank: usize| [&[0, 2, 1][..], &[1, 0, 1, 3], &[3]][rank].to_vec();
    let plain = seeded((UNEVEN.build)(&plain_device()), SEED);
    let loss = move |model: &Routed, rank| {
        let loss = model.through(&route(rank), rank, 0, &plain_device());
        loss.into_scalar::<f32>()
    };
    for (ranks, prefetch) in [(2, 1), (3, 1), (3, 2)] {
        let outcomes = on_ranks(ranks, move |world| {
            let policy = ShardPolicy::new().units(["layers.*"]).prefetch(prefetch);
            let model: Routed = build(UNEVEN, &world, &device(), policy)?;
            for handle in units(&model)? {
                handle.set_forward_prefetch(&units(&model)?[..])?;
            }
            // All ranks take one route, which another forward would expect again.
            let all = model.valid();
            for _ in 0..2 {
                drop(all.through(&[0, 1, 2], 0, 0, &plain_device()).into_data());
            }
            drop(all);
            let mut losses = Vec::new();
            let gathers = counted(&world, || {
                let body = |model: &Routed| loss(model, world.rank());
                losses.push(evaluate(&model, body).expect("evaluates"));
                losses.push(evaluate(&model, body).expect("evaluates again"));
            });
            Ok((losses, gathers.most, memory(&model)?.unsharded_live))
        });
        for (rank, (losses, most, live)) in outcomes.into_iter().enumerate() {
            let want = loss(&plain, rank);
            assert!(
                losses.iter().all(|got| (got - want).abs() <= 1e-6),
                "{losses:?}, not {want}"
            );
            assert_eq!(
                (most, live),
                (1, 0),
                "rank {rank} of {ranks}, prefetch {prefetch}"
            );
        }
    }
}
