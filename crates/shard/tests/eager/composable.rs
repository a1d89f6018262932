//! Combinations of `fully_shard`, `replicate` and ignored modules, in any order.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsAccumulator;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{OperationCounts, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, ShardPolicy, UnitState, backward, catch, fully_shard, memory, no_sync,
    params_with_gradient, replicate, units, unused_units,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, joined, on_ranks, optimizer, params, plainly,
    plainly_stepped, seeded, sharded, stepped, whole_params,
};
use super::nets::{MLP, Mlp, input};

fn with_mesh<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessMesh, Mlp) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    on_ranks(ranks, move |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let device = device();
        // Each rank has the same numbers.
        body(mesh, seeded((MLP.build)(&device), SEED))
    })
}

fn trains(
    ranks: usize,
    wrap: impl Fn(&ProcessMesh, Mlp) -> Result<Mlp, Error> + Send + Sync + 'static,
) -> Outcome {
    let outcomes = with_mesh(ranks, move |mesh, model| {
        let device = device();
        let mut model = wrap(&mesh, model)?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..10 {
            let loss = (MLP.loss)(&model, mesh.world().rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let params = whole_params((MLP.build)(&device), &model);
        Ok(Outcome { losses, params })
    });
    joined(&outcomes)
}

#[test]
fn replicate_works_alone_and_below_a_parent() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 10);
        let all = trains(ranks, |mesh, model| {
            replicate(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&all, &want, 1e-5);
        let mixed = trains(ranks, |mesh, mut model| {
            let head = replicate(model.head, mesh, ShardPolicy::new())?;
            model.head = head;
            fully_shard(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&mixed, &want, 1e-5);
        // A shard below a replica below a shard: the replica's subtree is left alone.
        let nested = trains(ranks, |mesh, mut model| {
            let mut block = model.blocks.remove(1);
            block.up = fully_shard(block.up, mesh, ShardPolicy::new())?;
            let block = replicate(block, mesh, ShardPolicy::new())?;
            model.blocks.insert(1, block);
            fully_shard(model, mesh, ShardPolicy::new().units(["blocks.*"]))
        });
        assert_close(&nested, &want, 1e-5);
    }
}

/// Their values equal those of shards; they differ in the memory they hold and in their gathers.
#[test]
fn a_replica_is_held_whole_and_is_not_a_unit_of_its_parent() {
    with_mesh(2, |mesh, model| {
        let world = mesh.world().clone();
        let gathers = |model: &Mlp| {
            let before = world.counts();
            let loss = (MLP.loss)(model, world.rank(), 0, &device());
            backward(loss, model)?;
            let counts = world.counts().since(&before);
            Ok::<_, Error>(counts.of(OperationKind::AllGather).operations)
        };
        let whole = bytes_of(&model);
        let all = replicate(model.clone(), &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        assert_eq!(memory(&all)?.parameters, whole);
        assert_eq!(gathers(&all)?, 0);

        // Shards below a replica below shards: the parent's pattern reaches the replica, and does not take it.
        let mut nested = model;
        let mut block = nested.blocks.remove(1);
        let (of_block, of_layer) = (bytes_of(&block), bytes_of(&block.up));
        block.up = fully_shard(block.up, &mesh, ShardPolicy::new())?;
        let shard = memory(&block.up)?.parameters;
        let block = replicate(block, &mesh, ShardPolicy::new())?;
        assert_eq!(memory(&block)?.parameters, of_block - of_layer + shard);
        nested.blocks.insert(1, block);
        let nested = fully_shard(nested, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let names: Vec<_> = units(&nested)?.iter().map(|unit| unit.name()).collect();
        assert_eq!(names, ["root", "blocks.0", "root", "root", "blocks.2"]);
        // Forward and backward of two blocks, and two roots once.
        assert_eq!(gathers(&nested)?, 2 * 2 + 2);
        Ok(())
    });
}

fn bytes_of<M: Module>(module: &M) -> usize {
    let len = |(_, values): (String, Vec<f32>)| size_of_val(&values[..]);
    params(module).into_iter().map(len).sum()
}

#[test]
fn units_come_in_the_order_of_the_module_in_every_form() {
    let names = with_mesh(2, |mesh, model| {
        let by_policy = fully_shard(
            model.clone(),
            &mesh,
            ShardPolicy::new().units(["blocks.*", "head"]),
        )?;
        let mut model = model;
        model.head = fully_shard(model.head, &mesh, ShardPolicy::new())?;
        model.blocks = model
            .blocks
            .into_iter()
            .rev()
            .map(|block| fully_shard(block, &mesh, ShardPolicy::new()))
            .collect::<Result<Vec<_>, _>>()?;
        model.blocks.reverse();
        let by_hand = fully_shard(model, &mesh, ShardPolicy::new())?;
        let names = |model: &Mlp| -> Result<Vec<_>, Error> {
            Ok(units(model)?.iter().map(|unit| unit.name()).collect())
        };
        Ok((names(&by_policy)?, names(&by_hand)?))
    });
    for (by_policy, by_hand) in names {
        assert_eq!(
            by_policy,
            ["root", "blocks.0", "blocks.1", "blocks.2", "head"]
        );
        assert_eq!(by_policy, by_hand);
    }
}

#[test]
fn names_are_kept() {
    with_mesh(2, |mesh, model| {
        let before: Vec<_> = params(&model).into_iter().map(|(path, _)| path).collect();
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let of_units = units(&model)?;
        let mut after: Vec<_> = of_units
            .iter()
            .flat_map(|unit| unit.parameters())
            .map(str::to_owned)
            .collect();
        let mut sorted = before;
        sorted.sort();
        after.sort();
        assert_eq!(after, sorted);
        Ok(())
    });
}

/// The loss of a single rank.
type Loss = fn(&Mlp, usize, usize, &Device) -> Tensor<1>;

/// The losses of two ranks.
const OWN: [Loss; 2] = [
    |model, _, step, device| model.loss(0, step, device),
    |model, _, step, device| model.loss(1, step, device),
];

/// Asserts that after a step of two ranks the ignored parameters have seen the rank's own gradients, and all others the
/// mean.
fn assert_own_or_mean(
    seen: impl IntoIterator<Item = Vec<(String, Vec<f32>)>>,
    is_ignored: impl Fn(&str) -> bool,
) {
    let mean = plainly(MLP, 2, 1).params;
    for (got, loss) in seen.into_iter().zip(OWN) {
        let own = plainly(Case { loss, ..MLP }, 1, 1).params;
        let want = mean.iter().zip(own);
        let want = want.map(|(mean, own)| {
            if is_ignored(&own.0) {
                own
            } else {
                mean.clone()
            }
        });
        let [got, want] = [got, want.collect()].map(|params| Outcome {
            losses: Vec::new(),
            params,
        });
        assert_close(&got, &want, 1e-5);
    }
}

#[test]
fn ignored_modules_are_left_alone() {
    let seen = with_mesh(2, |mesh, model| {
        let policy = ShardPolicy::new().units(["blocks.*"]).ignore(["head"]);
        let mut model = fully_shard(model, &mesh, policy)?;
        let world = mesh.world();
        let mut optim = optimizer();
        let before = world.counts();
        let loss = (MLP.loss)(&model, world.rank(), 0, &device());
        let gradients = backward(loss, &model)?;
        // The head's own parameters, and all others.
        let with_gradient = params_with_gradient(&model, &gradients).len();
        assert_eq!(with_gradient, 1 + 1 + 1 + 3 * 7 + 1);
        let since = world.counts().since(&before);
        assert_eq!(since.of(OperationKind::ReduceScatter).operations, 4);
        model = optim.step(1e-2, model, gradients);
        Ok(whole_params((MLP.build)(&device()), &model))
    });
    assert_own_or_mean(seen, |path| path.starts_with("head."));
    let heads = OWN.map(|loss| plainly(Case { loss, ..MLP }, 1, 1).params.pop());
    assert_ne!(heads[0], heads[1], "the ranks' own gradients differ");
    let message = with_mesh(1, |mesh, model| {
        let nothing = fully_shard(model.clone(), &mesh, ShardPolicy::new().ignore(["tail"]));
        let mut twice = model;
        twice.head = fully_shard(twice.head, &mesh, ShardPolicy::new())?;
        let sharded = fully_shard(twice, &mesh, ShardPolicy::new().ignore(["head"]));
        Ok((
            nothing.err().map(|e| e.to_string()),
            sharded.err().map(|e| e.to_string()),
        ))
    });
    let (nothing, sharded) = message[0].clone();
    let (nothing, sharded) = (nothing.unwrap_or_default(), sharded.unwrap_or_default());
    assert!(nothing.contains("`tail` matches no module"), "{nothing}");
    assert!(
        sharded.contains("`head.weight` should be ignored, but is already sharded"),
        "{sharded}"
    );
}

/// Works like `fully_shard([norm, head])`.
#[test]
fn several_modules_are_one_unit() {
    let joint = || {
        ShardPolicy::new()
            .units(["blocks.*", "*"])
            .unit_of(["norm", "head"])
    };
    for ranks in 1..=4 {
        let got = sharded(MLP, ranks, 6, joint());
        assert_close(&got, &plainly(MLP, ranks, 6), 1e-5);
        // A unit that is needed first and last.
        let around = ShardPolicy::new()
            .units(["blocks.*"])
            .unit_of(["embed", "head"]);
        let got = sharded(MLP, ranks, 6, around);
        assert_close(&got, &plainly(MLP, ranks, 6), 1e-5);
    }
    on_ranks(2, move |world| {
        let model = build(MLP, &world, &device(), joint())?;
        let handles = units(&model)?;
        let names: Vec<_> = handles.iter().map(|unit| unit.name()).collect();
        assert_eq!(
            names,
            ["embed", "blocks.0", "blocks.1", "blocks.2", "norm+head"]
        );
        let of_last: Vec<_> = handles[4].parameters().collect();
        assert_eq!(of_last, ["norm.gamma", "head.weight", "head.bias"]);
        let before = world.counts();
        backward((MLP.loss)(&model, world.rank(), 0, &device()), &model)?;
        let since = world.counts().since(&before);
        // In forward and in backward, which begins with the last: it still exists.
        assert_eq!(since.of(OperationKind::AllGather).operations, 2 * 5 - 1);
        assert_eq!(memory(&model)?.unsharded_live, 0);
        let twice = ShardPolicy::new()
            .unit_of(["norm", "head"])
            .unit_of(["embed", "head"]);
        let error = build(MLP, &world, &device(), twice).expect_err("the head twice");
        assert!(
            error.to_string().contains("given `head` for both"),
            "{error}"
        );
        let policy = ShardPolicy::new().unit_of(["norm", "tail"]);
        let error = build(MLP, &world, &device(), policy).expect_err("no tail");
        assert!(error.to_string().contains("`tail`"), "{error}");
        Ok(())
    });
}

/// The other parameters of these modules are sharded.
#[test]
fn single_parameters_are_left_alone() {
    let policy = || {
        let policy = ShardPolicy::new().units(["blocks.*"]);
        policy.ignore(["head.weight", "blocks.*.up.weight", "**.bias"])
    };
    let is_ignored = |path: &str| {
        path.ends_with(".bias") || path.ends_with(".up.weight") || path == "head.weight"
    };
    let seen = with_mesh(2, move |mesh, model| {
        let whole = params(&model);
        let model = fully_shard(model, &mesh, policy())?;
        let managed: Vec<String> = units(&model)?
            .iter()
            .flat_map(|unit| unit.parameters().map(str::to_owned).collect::<Vec<_>>())
            .collect();
        for (path, _) in whole {
            assert_eq!(managed.contains(&path), !is_ignored(&path), "{path}");
        }
        let world = mesh.world();
        let loss = (MLP.loss)(&model, world.rank(), 0, &device());
        let gradients = backward(loss, &model)?;
        let model = optimizer().step(1e-2, model, gradients);
        Ok(whole_params((MLP.build)(&device()), &model))
    });
    assert_own_or_mean(seen, is_ignored);
}

#[test]
fn sharding_twice_is_rejected_by_every_verb() {
    let messages = with_mesh(1, |mesh, model| {
        let again = |model: Mlp| {
            fully_shard(model, &mesh, ShardPolicy::new())
                .err()
                .map(|e| e.to_string())
        };
        let replica = |model: Mlp| {
            replicate(model, &mesh, ShardPolicy::new())
                .err()
                .map(|e| e.to_string())
        };
        let sharded = fully_shard(model.clone(), &mesh, ShardPolicy::new())?;
        let replicated = replicate(model, &mesh, ShardPolicy::new())?;
        Ok([
            again(sharded.clone()),
            again(replicated.clone()),
            replica(sharded),
            replica(replicated),
        ])
    });
    for message in messages[0].clone() {
        let message = message.unwrap_or_default();
        assert!(
            message.contains("already belongs to a unit, such as `root`"),
            "{message}"
        );
    }
}

#[test]
fn units_report_their_state_and_unshard_on_request() {
    with_mesh(2, |mesh, model| {
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*"]))?;
        let all = units(&model)?;
        let block = &all[1];
        assert_eq!(
            (block.name().as_str(), block.state()),
            ("blocks.0", UnitState::Sharded)
        );
        let handle = block.unshard()?;
        assert_eq!(block.state(), UnitState::Gathering);
        handle.wait()?;
        assert_eq!(block.state(), UnitState::Unsharded);
        block.reshard()?;
        assert_eq!(block.state(), UnitState::Sharded);
        let _left_to_the_forward = block.unshard()?;
        let loss = (MLP.loss)(&model, mesh.world().rank(), 0, &device());
        assert_eq!(all[0].state(), UnitState::Unsharded, "the root stays");
        assert_eq!(
            block.state(),
            UnitState::Sharded,
            "dropped after its forward"
        );
        backward(loss, &model)?;
        assert!(all.iter().all(|unit| unit.state() == UnitState::Sharded));
        Ok(())
    });
}

/// Training continues after an error in forward and in backward, on all ranks.
#[test]
fn an_error_leaves_everything_sharded() {
    let want = plainly(MLP, 2, 3);
    let outcomes = with_mesh(2, |mesh, model| {
        let device = device();
        let rank = mesh.world().rank();
        let is_broken = Arc::new(AtomicBool::new(false));
        let policy = ShardPolicy::new().units(["blocks.*"]).gradient_hook({
            let is_broken = is_broken.clone();
            move |path, gradient| {
                if path == "blocks.1.up.weight" && is_broken.load(Relaxed) {
                    gradient.slice(0..1)
                } else {
                    gradient
                }
            }
        });
        let mut model = fully_shard(model, &mesh, policy)?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        let assert_sharded = |model: &Mlp, after: &str| -> Result<(), Error> {
            for unit in units(model)? {
                assert_eq!(unit.state(), UnitState::Sharded, "{} {after}", unit.name());
            }
            Ok(())
        };
        for step in 0..3 {
            let all = units(&model)?;
            let in_forward = catch(|| {
                model.blocks[0].up.weight.val();
                all[1].reshard().map(|()| model.blocks[0].down.weight.val())
            });
            drop(all);
            let message = in_forward.err().map(|error| error.to_string());
            let message = message.unwrap_or_default();
            assert!(message.contains("must be Unsharded"), "{message}");
            assert_sharded(&model, "after an error in forward")?;

            is_broken.store(true, Relaxed);
            let in_backward = backward((MLP.loss)(&model, rank, step, &device), &model);
            is_broken.store(false, Relaxed);
            let message = in_backward.err().map(|error| error.to_string());
            let message = message.unwrap_or_default();
            assert!(message.contains("blocks.1.up.weight"), "{message}");
            assert_sharded(&model, "after an error in backward")?;

            let loss = (MLP.loss)(&model, rank, step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        assert_eq!(unused_units(&model)?, Vec::<String>::new());
        let params = whole_params((MLP.build)(&device), &model);
        Ok(Outcome { losses, params })
    });
    assert_close(&joined(&outcomes), &want, 1e-5);
}

#[test]
fn unused_units_are_named() {
    with_mesh(2, |mesh, model| {
        let model = fully_shard(model, &mesh, ShardPolicy::new().units(["blocks.*", "head"]))?;
        let loss = model.head.weight.val().sum();
        backward(loss, &model)?;
        assert_eq!(
            unused_units(&model)?,
            ["root", "blocks.0", "blocks.1", "blocks.2"]
        );
        Ok(())
    });
}

/// The losses of two batches, with one backward for both.
const JOINED: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| {
        model.loss(rank, step, device) + model.loss(rank, step + 1, device)
    },
};

/// Several forwards before one backward, and one backward for each of several forwards.
#[test]
fn forwards_and_backwards_may_alternate_freely() {
    let want = plainly_stepped(JOINED, 2);
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    let together = stepped(MLP, 2, blocks(), |model, world, device| {
        backward((JOINED.loss)(model, world.rank(), 0, device), model)
    });
    assert_close(&together, &want, 1e-5);
    let apart = stepped(MLP, 2, blocks(), |model, world, device| {
        let [first, second] = [0, 1].map(|step| model.loss(world.rank(), step, device));
        let mut sum = GradientsAccumulator::new();
        sum.accumulate(model, backward(first, model)?);
        sum.accumulate(model, backward(second, model)?);
        Ok(sum.grads())
    });
    assert_close(&apart, &want, 1e-5);
}

/// A model whose own forward reads a weight of its child.
#[derive(Module, Debug)]
struct Reading {
    child: Linear,
    scale: Linear,
}

const READING: Case<Reading> = Case {
    build: |device| Reading {
        child: LinearConfig::new(5, 5).init(device),
        scale: LinearConfig::new(5, 5).init(device),
    },
    loss: |model, rank, step, device| {
        let x = input([3, 5], rank, step, device);
        let y = model
            .scale
            .forward(x)
            .matmul(model.child.weight.val().transpose());
        y.powf_scalar(2.0).mean()
    },
};

#[test]
fn a_parent_reads_a_weight_of_a_unit() {
    for ranks in 1..=4 {
        let policy = || ShardPolicy::new().units(["child"]);
        let got = sharded(READING, ranks, 5, policy());
        assert_close(&got, &plainly(READING, ranks, 5), 1e-5);
        let read_again = Case {
            loss: |model: &Reading, rank, step, device| {
                let weight = model.child.weight.val();
                (READING.loss)(model, rank, step, device) + weight.mean()
            },
            ..READING
        };
        // The root stays for its backward. A read of the child's weight gathers the child, and so does the
        // backward of a product.
        for (case, gathers) in [(READING, 3), (read_again, 4)] {
            for counts in of_third_step(case, ranks, policy()) {
                let number = |kind| counts.of(kind).operations;
                assert_eq!(number(OperationKind::AllGather), gathers, "{ranks} ranks");
                assert_eq!(number(OperationKind::ReduceScatter), gathers - 1);
                assert_eq!(number(OperationKind::AllReduce), 1);
            }
        }
    }
}

/// The operations of each rank in the third step.
fn of_third_step<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    policy: ShardPolicy,
) -> Vec<OperationCounts> {
    on_ranks(ranks, move |world| {
        let device = device();
        let model = build(case, &world, &device, policy.clone())?;
        let mut before = world.counts();
        for step in 0..3 {
            before = world.counts();
            backward((case.loss)(&model, world.rank(), step, &device), &model)?;
        }
        Ok(world.counts().since(&before))
    })
}

/// For a part of a module, only the units of that part.
#[test]
fn a_part_of_a_module_is_left_unreduced() {
    on_ranks(2, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let model = build(MLP, &world, &device, policy)?;
        let reductions = |part: Option<usize>| {
            let before = world.counts();
            let run = || {
                let loss = (MLP.loss)(&model, world.rank(), 0, &device);
                backward(loss, &model)
            };
            let gradients = match part {
                None => run()?,
                Some(block) => no_sync(&model.blocks[block], run)??,
            };
            let number = params_with_gradient(&model, &gradients).len();
            let counts = world.counts().since(&before);
            Ok::<_, Error>((counts.of(OperationKind::ReduceScatter).operations, number))
        };
        let (all, of_all) = reductions(None)?;
        let (others, of_others) = reductions(Some(1))?;
        assert_eq!(all - others, 1, "one block is not reduced");
        assert_eq!(
            of_all - of_others,
            params(&Mlp::new(&device).blocks[1]).len()
        );
        assert!(memory(&model)?.unreduced > 0);
        Ok(())
    });
}
