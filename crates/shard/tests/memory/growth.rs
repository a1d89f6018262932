//! The memory that a training run leaves behind, which must not grow.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, backward, fully_shard, memory, trim};

use super::{HEAP, NUM_BLOCKS, Net, ROOT, UNIT, alone, blocks, checkpointing, on_ranks};

/// Live bytes of all ranks, once all have reached this point.
fn live(world: &ProcessGroup) -> Result<usize, Error> {
    world.barrier("settled")?;
    let live = HEAP.current_usage();
    world.barrier("measured")?;
    Ok(live)
}

struct Scale(f64);

impl ModuleMapper for Scale {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match D {
            // Shards; the parameters themselves are stand-ins.
            1 => param.map(|value| {
                let trainable = value.is_require_grad();
                value
                    .mul_scalar(self.0)
                    .detach()
                    .set_require_grad(trainable)
            }),
            _ => param,
        }
    }
}

#[derive(Clone, Copy)]
enum Habit {
    /// A moving average that runs tracked, although only its values are used.
    Teacher,
    /// A metric of a tracked forward before the parameters are replaced.
    Metric,
    /// A module that is dropped between its forward and its backward.
    Dropped,
}

/// Live bytes after each step.
fn over_time(habit: Habit) -> Vec<usize> {
    let mut of_ranks = on_ranks(2, move |world, mesh| {
        let device = checkpointing();
        let mut model = fully_shard(Net::new(&device), &mesh, blocks())?;
        let mut teacher = model.clone();
        let mut optim = SgdConfig::new().init();
        let mut seen = Vec::new();
        for _ in 0..40 {
            let target = match habit {
                Habit::Teacher => Some(teacher.loss([1, 5], &device).detach()),
                _ => None,
            };
            let loss = model.loss([1, 5], &device);
            let loss = target.into_iter().fold(loss, |loss, target| loss - target);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-6, model, gradients);
            match habit {
                Habit::Teacher => teacher = teacher.map(&mut Scale(0.999)),
                Habit::Metric => {
                    drop(model.loss([1, 5], &device));
                    model = model.map(&mut Scale(0.999));
                }
                Habit::Dropped => {
                    let other = fully_shard(Net::new(&device), &mesh, blocks())?;
                    let loss = other.loss([1, 5], &device);
                    drop(other);
                    drop(loss);
                }
            }
            seen.push(live(&world)?);
        }
        // The values that the graph of the last forward without a backward saved of the root.
        assert!(memory(&model)?.unsharded_live <= ROOT);
        Ok(seen)
    });
    of_ranks.swap_remove(0)
}

#[track_caller]
fn assert_constant(seen: &[usize]) {
    // A step may be measured before a rank has released the memory that it reads, which is at most another
    // rank's shards.
    let late_release = NUM_BLOCKS * UNIT / 2;
    let quarter = seen.len() / 4;
    let least = |from: usize| seen[from..from + quarter].iter().copied().min();
    let (early, late) = (least(quarter), least(3 * quarter));
    assert!(
        late <= early.map(|bytes| bytes + late_release + 2 * UNIT),
        "live bytes {seen:?}"
    );
}

#[test]
fn a_tracked_teacher_leaves_nothing() {
    let _turn = alone();
    assert_constant(&over_time(Habit::Teacher));
}

#[test]
fn a_forward_before_a_map_leaves_nothing() {
    let _turn = alone();
    assert_constant(&over_time(Habit::Metric));
}

#[test]
fn a_module_that_is_dropped_after_its_forward_leaves_nothing() {
    let _turn = alone();
    assert_constant(&over_time(Habit::Dropped));
}

#[test]
fn a_thousand_forwards_without_backward_leave_nothing() {
    let _turn = alone();
    let number = match std::env::var_os("BURN_FSDP_LONG") {
        Some(_) => 1000,
        None => 200,
    };
    let seen = on_ranks(2, move |world, mesh| {
        let device = checkpointing();
        let mut model = fully_shard(Net::new(&device), &mesh, blocks())?;
        let mut optim = SgdConfig::new().init();
        let mut seen = Vec::new();
        for _ in 0..3 {
            // The parameters of these forwards are replaced before any backward.
            (0..number).for_each(|_| drop(model.loss([1, 5], &device)));
            for _ in 0..3 {
                let gradients = backward(model.loss([1, 5], &device), &model)?;
                model = optim.step(1e-6, model, gradients);
            }
            seen.push(live(&world)?);
        }
        Ok(seen)
    });
    assert_constant(&seen[0]);
}

/// A panic in the program's own code, which leaves backward in the middle.
#[test]
fn a_panic_in_a_hook_leaves_nothing() {
    let _turn = alone();
    let failed = || {
        let config = LaunchConfig::new(2).deadline(Duration::from_secs(60));
        let ended = launch(config, |world| {
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
            let policy = blocks().gradient_hook(|path, gradient| {
                if path.starts_with("blocks.4.") {
                    std::panic::resume_unwind(Box::new("of the user's own"));
                }
                gradient
            });
            let device = checkpointing();
            let model = fully_shard(Net::new(&device), &mesh, policy)?;
            backward(model.loss([1, 5], &device), &model).map(drop)
        });
        assert!(ended.is_err());
        // Burn drops leftover graphs at the end of any backward.
        let device = checkpointing();
        drop(Net::new(&device).loss([1, 5], &device).backward());
        HEAP.current_usage()
    };
    let seen: Vec<_> = (0..4).map(|_| failed()).collect();
    assert_constant(&seen);
}

#[test]
fn memory_that_is_kept_is_counted_and_can_be_given_back() {
    let _turn = alone();
    let seen = on_ranks(2, |world, mesh| {
        let device = checkpointing();
        let model = fully_shard(Net::new(&device), &mesh, blocks())?;
        drop(backward(model.loss([1, 5], &device), &model)?);
        let kept = memory(&model)?.pooled;
        let before = live(&world)?;
        trim(&model)?;
        let after = live(&world)?;
        assert_eq!(memory(&model)?.pooled, 0);
        Ok((kept, before, after))
    });
    let kept: usize = seen.iter().map(|seen| seen.0).sum();
    let (_, before, after) = seen[0];
    assert!(kept >= UNIT, "{kept}");
    // Within the size of two ranks' bookkeeping.
    assert!(
        before.abs_diff(after + kept) < 64 << 10,
        "{before} - {after} = {kept}"
    );
}
