//! The memory of a rank that is run without the others.

use burn::optim::AdamWConfig;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, Memory, ShardPolicy, backward, fully_shard, memory, reset_peak};

use super::optimizers::kept_by_kernels;
use super::{HEAP, NUM_BLOCKS, Net, UNIT, alone, blocks, checkpointing, on_ranks};

const SHAPE: [usize; 2] = [4, 32];

/// What the third step of a rank takes: by the engine's count, and by the heap's, above what there was before the module.
fn of_a_rank(mesh: &ProcessMesh, before: usize, policy: ShardPolicy) -> Result<Seen, Error> {
    let device = checkpointing();
    let mut model = fully_shard(Net::new(&device), mesh, policy)?;
    let mut optim = AdamWConfig::new().init();
    for step in 0..3 {
        if step == 2 {
            reset_peak(&model)?;
            mesh.world().barrier("third step")?;
            HEAP.reset_peak_usage();
            mesh.world().barrier("reset")?;
        }
        let gradients = backward(model.loss(SHAPE, &device), &model)?;
        model = optim.step(1e-3, model, gradients);
    }
    mesh.world().barrier("third step done")?;
    Ok(Seen {
        memory: memory(&model)?,
        heap: HEAP.peak_usage() - before,
    })
}

struct Seen {
    memory: Memory,
    heap: usize,
}

/// A rank among others that do not exist takes what it takes among those that do.
#[test]
fn the_memory_of_a_rank_is_known_without_the_others() -> Result<(), Error> {
    let _turn = alone();
    // The threads of real ranks are new, and each gets memory for its kernels.
    let kept = kept_by_kernels();
    for (ranks, policy) in [
        (2, blocks()),
        (3, blocks().prefetch(1)),
        (3, blocks().shard_vectors(true)),
    ] {
        let before = HEAP.current_usage();
        let of_policy = policy.clone();
        let real = on_ranks(ranks, move |_, mesh| {
            of_a_rank(&mesh, before, of_policy.clone())
        });
        let mut together = 0;
        for (rank, real) in real.iter().enumerate() {
            let before = HEAP.current_usage();
            let group = ProcessGroup::fake(ranks, rank);
            let mesh = ProcessMesh::new(&group, Mesh::line("shard", ranks)?)?;
            let alone = of_a_rank(&mesh, before, policy.clone())?;
            assert_eq!(alone.memory.parameters, real.memory.parameters);
            assert_eq!(alone.memory.unsharded_peak, real.memory.unsharded_peak);
            together += alone.heap;
        }
        let heap = real[0].heap;
        println!("{ranks} ranks: {heap} bytes, {together} one by one");
        assert!(heap > NUM_BLOCKS * UNIT, "the model and its states");
        // Ranks need not be at their peaks at the same time.
        let tolerance = heap / 20 + kept.div_ceil(2) * ranks;
        assert!(
            heap.abs_diff(together) <= tolerance,
            "{heap} {together} {kept}"
        );
    }
    Ok(())
}
