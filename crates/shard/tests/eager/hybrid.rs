//! Hybrid sharding, smaller groups for backward, and a separate group for reductions.

use burn::module::Module;
use burn_fsdp_collectives::{CommStage, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ReduceGroup, ShardPolicy, backward, fully_shard, units, wrap_plan};

use super::bench::{
    Case, Outcome, assert_close, device, joined, on_ranks, optimizer, panic_of, plainly,
    seeded_by_rank, sharded, train, whole_params,
};
use super::nets::{CONV_NET, MLP, Mlp, RECURRENT};

pub(crate) fn build<M: Module + 'static>(
    case: Case<M>,
    world: &ProcessGroup,
    layout: [usize; 2],
    policy: ShardPolicy,
) -> Result<M, Error> {
    let layout = Mesh::new([("replicate", layout[0]), ("shard", layout[1])])?;
    let mesh = ProcessMesh::new(world, layout)?;
    fully_shard(
        seeded_by_rank((case.build)(&device()), world.rank()),
        &mesh,
        policy.replicate_axis("replicate"),
    )
}

pub(crate) fn trained<M: Module + 'static>(
    case: Case<M>,
    layout: [usize; 2],
    policy: ShardPolicy,
    steps: usize,
) -> Outcome {
    let ranks = layout[0] * layout[1];
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let model = build(case, &world, layout, policy.clone())?;
        train(model, case, world.rank(), steps, &device)
    });
    joined(&outcomes)
}

#[test]
fn replicas_of_shards_agree_with_one_rank() {
    for layout in [
        [1, 1],
        [1, 2],
        [2, 1],
        [3, 1],
        [1, 3],
        [2, 2],
        [4, 1],
        [1, 4],
    ] {
        let ranks = layout[0] * layout[1];
        let blocks = ShardPolicy::new().units(["blocks.*"]);
        assert_close(
            &trained(MLP, layout, blocks, 10),
            &plainly(MLP, ranks, 10),
            1e-5,
        );
    }
    let layers = ShardPolicy::new().units(["layers.*"]);
    assert_close(
        &trained(RECURRENT, [2, 2], layers, 10),
        &plainly(RECURRENT, 4, 10),
        1e-5,
    );
    let convs = ShardPolicy::new().units(["convs.*"]);
    assert_close(
        &trained(CONV_NET, [2, 2], convs, 10),
        &plainly(CONV_NET, 4, 10),
        1e-5,
    );
}

/// Counts by group: the ledger of each axis.
#[test]
fn two_by_two_issues_the_expected_operations() {
    let seen = on_ranks(4, |world| {
        let device = device();
        let layout = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let policy = ShardPolicy::new()
            .units(["blocks.*"])
            .replicate_axis("replicate");
        let model = fully_shard((MLP.build)(&device), &mesh, policy)?;
        let mut moved = Vec::new();
        for step in 0..3 {
            let groups = [mesh.along("shard")?, mesh.along("replicate")?, &world];
            let before = groups.map(ProcessGroup::counts);
            let loss = (MLP.loss)(&model, world.rank(), step, &device);
            backward(loss, &model)?;
            let since = groups
                .iter()
                .zip(before)
                .map(|(group, before)| group.counts().since(&before));
            moved = since.collect();
        }
        Ok(moved)
    });
    for groups in seen {
        let count = |group: usize, kind| groups[group].of(kind).operations;
        let [shard, replicate, world] = [0, 1, 2];
        assert_eq!(
            count(shard, OperationKind::AllGather),
            7,
            "the root once, each block twice"
        );
        assert_eq!(count(shard, OperationKind::ReduceScatter), 4, "one a unit");
        assert_eq!(count(shard, OperationKind::AllReduce), 0);
        assert_eq!(
            groups[replicate].of(OperationKind::AllReduce),
            groups[replicate].total()
        );
        assert_eq!(count(replicate, OperationKind::AllReduce), 4, "one a unit");
        assert_eq!(
            count(world, OperationKind::AllReduce),
            1,
            "what all ranks hold whole"
        );
        assert_eq!(groups[world].total().operations, 1);
    }
}

#[test]
fn replica_reductions_can_wait_for_the_last_micro_batch() {
    let want = plainly(MLP, 8, 6);
    let outcomes = on_ranks(4, |world| {
        let device = device();
        let layout = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let policy = ShardPolicy::new()
            .units(["blocks.*"])
            .replicate_axis("replicate");
        let model = seeded_by_rank((MLP.build)(&device), world.rank());
        let mut model = fully_shard(model, &mesh, policy)?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..6 {
            let mut whole = burn::optim::GradientsAccumulator::new();
            let mut value = 0.0;
            for micro in 0..2 {
                for handle in units(&model)? {
                    handle.set_requires_all_reduce(micro == 1)?;
                }
                let before = mesh.along("replicate")?.counts();
                let rank = micro * 4 + world.rank();
                let loss = (MLP.loss)(&model, rank, step, &device).div_scalar(2.0);
                value += loss.clone().into_scalar::<f32>();
                whole.accumulate(&model, backward(loss, &model)?);
                let crossed = mesh.along("replicate")?.counts().since(&before);
                let crossed = crossed.of(OperationKind::AllReduce).operations;
                // One per unit, in the micro-batch that crosses.
                assert_eq!(crossed, 4 * micro as u64, "micro-batch {micro}");
            }
            losses.push(value);
            model = optim.step(1e-2, model, whole.grads());
        }
        let params = whole_params((MLP.build)(&device), &model);
        Ok(Outcome { losses, params })
    });
    assert_close(&joined(&outcomes), &want, 1e-5);
}

#[test]
fn backward_gathers_among_neighbours() {
    let policy = ShardPolicy::new()
        .units(["blocks.*"])
        .reshard_after_forward_to(2);
    assert_close(
        &sharded(MLP, 4, 10, policy.clone()),
        &plainly(MLP, 4, 10),
        1e-5,
    );
    let layers = ShardPolicy::new()
        .units(["layers.*"])
        .reshard_after_forward_to(2);
    assert_close(
        &sharded(RECURRENT, 4, 10, layers),
        &plainly(RECURRENT, 4, 10),
        1e-5,
    );
    // One means to keep, and all means to drop to the shard.
    assert_close(
        &sharded(MLP, 4, 3, policy.clone().reshard_after_forward_to(1)),
        &plainly(MLP, 4, 3),
        1e-5,
    );
    let message = panic_of(|| sharded(MLP, 4, 1, policy.reshard_after_forward_to(3)));
    assert!(message.contains("groups of 3 ranks"), "{message}");
    assert!(message.contains("divisor of the 4 ranks"), "{message}");
}

/// The operations that a rank starts in the third step: kind, group and label of each.
fn started(ranks: usize, policy: ShardPolicy) -> Vec<(OperationKind, String, String)> {
    let seen = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = super::bench::build(MLP, &world, &device, policy.clone())?;
        let mut optim = optimizer();
        for step in 0..3 {
            if step == 2 {
                world.start_recording(|| 0);
            }
            let loss = model.loss(world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let spans = world.end_recording().into_iter();
        let started = spans.filter(|span| span.stage == CommStage::Start);
        let started = started.map(|span| {
            let operation = span.operation;
            let [group, label] = [&operation.group, &operation.label];
            (
                operation.kind,
                group.as_str().to_owned(),
                label.as_str().to_owned(),
            )
        });
        Ok(started.collect::<Vec<_>>())
    });
    for other in &seen[1..] {
        let groups = |started: &[(OperationKind, String, String)]| -> Vec<_> {
            let groups = started
                .iter()
                .map(|(kind, group, _)| (*kind, group.clone()));
            groups.collect()
        };
        assert_eq!(groups(other), groups(&seen[0]));
    }
    seen[0].clone()
}

#[test]
fn backward_communicates_only_with_neighbours() {
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    for (policy, far, near) in [
        // Every block twice and the root once.
        (blocks(), 7, 0),
        // The blocks' second gathers stay among the neighbours.
        (blocks().reshard_after_forward_to(2), 4, 3),
        // Weights that are kept are not gathered again, from no rank.
        (blocks().reshard_after_forward_to(1), 4, 0),
    ] {
        let started = started(4, policy);
        let gathers = |group: &str| {
            let of = |(kind, other, _): &&(OperationKind, String, String)| {
                *kind == OperationKind::AllGather && other.contains(group)
            };
            started.iter().filter(of).count()
        };
        assert_eq!((gathers("world"), gathers("neighbours")), (far, near));
        for (kind, group, label) in &started {
            if *kind == OperationKind::AllGather {
                let is_backward = label.contains("backward");
                assert_eq!(group.contains("neighbours"), is_backward && near > 0);
            }
        }
    }
}

#[test]
fn reductions_can_have_their_own_group() {
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    for ranks in 1..=4 {
        let policy = blocks().reduce_group(ReduceGroup::Own);
        assert_close(
            &sharded(MLP, ranks, 5, policy),
            &plainly(MLP, ranks, 5),
            1e-5,
        );
    }
    for (policy, group) in [
        (blocks(), "world"),
        (blocks().reduce_group(ReduceGroup::Own), "reductions"),
    ] {
        let started = started(2, policy);
        let of = |wanted| {
            let of = started.iter().filter(move |(kind, ..)| *kind == wanted);
            of.map(|(_, group, _)| group.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(of(OperationKind::ReduceScatter), [group; 4]);
        assert_eq!(of(OperationKind::AllGather), ["world"; 7]);
    }
}

/// The batches of the other half of the ranks.
const OTHERS: Case<Mlp> = Case {
    build: Mlp::new,
    loss: |model, rank, step, device| model.loss(rank + 2, step, device),
};

#[test]
fn a_subset_of_the_ranks_shards_among_itself() {
    const STEPS: usize = 4;
    let outcomes = on_ranks(4, |world| {
        let layout = Mesh::new([("other", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let model = seeded_by_rank((MLP.build)(&device), mesh.along("shard")?.rank());
        let mut model = fully_shard(model, &mesh, policy)?;
        assert_eq!(wrap_plan(&model)?.world_size, 2);
        let mut optim = optimizer();
        let mut losses = Vec::new();
        let before = world.counts();
        for step in 0..STEPS {
            let loss = (MLP.loss)(&model, world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        assert_eq!(world.counts(), before, "nothing goes to the other half");
        let params = whole_params((MLP.build)(&device), &model);
        Ok(Outcome { losses, params })
    });
    for (half, case) in outcomes.chunks(2).zip([MLP, OTHERS]) {
        assert_close(&joined(half), &plainly(case, 2, STEPS), 1e-5);
    }
}
