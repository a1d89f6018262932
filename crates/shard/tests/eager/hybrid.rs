//! Hybrid sharding, smaller groups for backward, and a group of their own for reductions.

use burn::module::Module;
use burn_fsdp_collectives::{OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ReduceGroup, ShardPolicy, backward, fully_shard, units, wrap_plan};

use super::bench::{
    Case, Outcome, SEED, assert_close, device, on_ranks, optimizer, panic_of, plainly, seed_turn,
    sharded, whole_params,
};
use super::nets::{CONV_NET, MLP, RECURRENT};

fn build<M: Module + 'static>(
    case: Case<M>,
    world: &ProcessGroup,
    layout: [usize; 2],
    policy: ShardPolicy,
) -> Result<M, Error> {
    let layout = Mesh::new([("replicate", layout[0]), ("shard", layout[1])])?;
    let mesh = ProcessMesh::new(world, layout)?;
    let device = device();
    let _turn = (world.rank() == 0).then(seed_turn);
    if world.rank() == 0 {
        device.seed(SEED);
    }
    fully_shard(
        (case.build)(&device),
        &mesh,
        policy.replicate_axis("replicate"),
    )
}

fn trained<M: Module + 'static>(
    case: Case<M>,
    layout: [usize; 2],
    policy: ShardPolicy,
    steps: usize,
) -> Outcome {
    let ranks = layout[0] * layout[1];
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(case, &world, layout, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = (case.loss)(&model, world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(Outcome {
            losses,
            params: whole_params((case.build)(&device), &model),
        })
    });
    let mut first = outcomes[0].clone();
    for outcome in &outcomes {
        assert!(
            outcome.params == first.params,
            "replicas agree on every bit"
        );
    }
    for (step, loss) in first.losses.iter_mut().enumerate() {
        *loss = outcomes
            .iter()
            .map(|outcome| outcome.losses[step])
            .sum::<f32>()
            / ranks as f32;
    }
    first
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
fn two_by_two_issues_exactly_what_it_should() {
    let seen = on_ranks(4, |world| {
        let device = device();
        let layout = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let policy = ShardPolicy::new()
            .units(["blocks.*"])
            .replicate_axis("replicate");
        let turn = (world.rank() == 0).then(seed_turn);
        let model = fully_shard((MLP.build)(&device), &mesh, policy)?;
        drop(turn);
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
fn crossing_may_wait_for_the_last_micro_batch() {
    let want = plainly(MLP, 8, 6);
    let got = on_ranks(4, |world| {
        let device = device();
        let mut model = build(MLP, &world, [2, 2], ShardPolicy::new().units(["blocks.*"]))?;
        let mut optim = optimizer();
        for step in 0..6 {
            let mut whole = burn::optim::GradientsAccumulator::new();
            for micro in 0..2 {
                for handle in units(&model)? {
                    handle.set_requires_all_reduce(micro == 1)?;
                }
                let rank = micro * 4 + world.rank();
                let loss = (MLP.loss)(&model, rank, step, &device).div_scalar(2.0);
                whole.accumulate(&model, backward(loss, &model)?);
            }
            model = optim.step(1e-2, model, whole.grads());
        }
        Ok(whole_params((MLP.build)(&device), &model))
    });
    let got = Outcome {
        losses: want.losses.clone(),
        params: got[0].clone(),
    };
    assert_close(&got, &want, 1e-5);
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
    // One is to keep, all is to drop to the shard.
    assert_close(
        &sharded(MLP, 4, 3, policy.clone().reshard_after_forward_to(1)),
        &plainly(MLP, 4, 3),
        1e-5,
    );
    let message = panic_of(|| sharded(MLP, 4, 1, policy.reshard_after_forward_to(3)));
    assert!(message.contains("groups of 3 ranks"), "{message}");
    assert!(message.contains("divisor of the 4 ranks"), "{message}");
}

#[test]
fn reductions_may_have_a_group_of_their_own() {
    for ranks in 1..=4 {
        let policy = ShardPolicy::new()
            .units(["blocks.*"])
            .reduce_group(ReduceGroup::Own);
        assert_close(
            &sharded(MLP, ranks, 5, policy),
            &plainly(MLP, ranks, 5),
            1e-5,
        );
    }
}

#[test]
fn a_subset_of_the_ranks_shards_among_itself() {
    on_ranks(4, |world| {
        let layout = Mesh::new([("other", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let turn = (mesh.along("shard")?.rank() == 0).then(seed_turn);
        let model = fully_shard((MLP.build)(&device()), &mesh, policy)?;
        drop(turn);
        assert_eq!(wrap_plan(&model)?.world_size, 2);
        backward((MLP.loss)(&model, world.rank(), 0, &device()), &model)?;
        Ok(())
    });
}
