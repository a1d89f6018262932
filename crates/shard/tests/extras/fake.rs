//! One rank of many, on a single thread: counting and measuring without launching anything.

use burn::module::Module;
use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, fully_shard, memory, num_params};

use super::bench::{device, optimizer, ready};
use super::nets::{MLP, Mlp};

#[test]
fn a_step_of_one_rank_of_many_is_counted_without_the_others() -> Result<(), Error> {
    for (ranks, rank) in [(4, 0), (4, 3), (64, 63)] {
        let group = ProcessGroup::fake(ranks, rank);
        let mesh = ProcessMesh::new(&group, Mesh::line("shard", ranks)?)?;
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let mut model = fully_shard(ready(|| Mlp::new(&device)), &mesh, policy)?;
        let mut optim = optimizer();
        let mut counter = CommCounter::new([&group]);
        for step in 0..3 {
            counter.reset();
            let gradients = backward((MLP.loss)(&model, rank, step, &device), &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        counter.expect(&[
            (OperationKind::AllGather, 7),
            (OperationKind::ReduceScatter, 4),
            (OperationKind::AllReduce, 1),
        ]);
        let whole = 4 * num_params(&model);
        let held = memory(&model)?.parameters;
        assert!(held < whole / 2, "{held} of {whole} bytes");
        assert_eq!(model.devices().len(), 1);
    }
    Ok(())
}
