//! Memory bounds that fail if a rank holds a whole model before or together with its part of one.

use std::fs::{self, DirEntry};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use burn::module::{Lora, Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Shape, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Mesh, Placement};
use burn_fsdp_spmd::{
    CompiledStep, DataParallel, Error, Evaluation, Expand, LazyLora, Mode, ShardSpec, Strategy,
    compile, compile_from,
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process, so only one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the threads of earlier ranks have ended, because they free their memory late. (Linux counts threads.)
fn settle() {
    let is_rank = |thread: &DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("rank"))
    };
    while fs::read_dir("/proc/self/task")
        .is_ok_and(|threads| threads.flatten().any(|thread| is_rank(&thread)))
    {
        thread::sleep(Duration::from_millis(1));
    }
}

const NUM_LAYERS: usize = 12;
const DIM: usize = 512;
/// Bytes of a layer's only parameter.
const LAYER: usize = 4 * DIM * 2 * DIM;
const WHOLE: usize = NUM_LAYERS * LAYER;
/// Allowance for traces and tables, over all ranks.
const BOOKS: usize = LAYER;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |index| {
            let (from, into) = match index % 2 {
                0 => (DIM, 2 * DIM),
                _ => (2 * DIM, DIM),
            };
            LinearConfig::new(from, into).with_bias(false).init(device)
        };
        Self {
            layers: (0..NUM_LAYERS).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let layers = self.layers.iter();
        layers.fold(x, |x, layer| relu(layer.forward(x))).mean()
    }
}

type Made = CompiledStep<Tensor<2>>;

#[derive(Debug, Clone, Copy)]
enum Division {
    Data(DataParallel),
    Hybrid,
    Rows,
}

impl Division {
    fn mode(self, world: &ProcessGroup) -> Result<Mode, Error> {
        let mesh = |axes: [(&str, usize); 2]| {
            ProcessMesh::new(world, Mesh::new(axes)?).map_err(|source| Error::Collective {
                node: 0,
                source: Arc::new(source),
            })
        };
        match self {
            Self::Data(style) => Ok(Mode::data_parallel(world.clone(), style)),
            Self::Hybrid => {
                let mesh = mesh([("replicate", 2), ("shard", world.size() / 2)])?;
                Mode::hybrid(mesh, "replicate", Strategy::FullShard)
            }
            Self::Rows => {
                let mesh = mesh([("data", 1), ("model", world.size())])?;
                let rows = Expand::new().parameter("layers.*.weight", "model", Placement::Shard(0));
                Ok(Mode::expand(mesh, rows))
            }
        }
    }
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    settle();
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a closure on all ranks at once. Returns the peak growth of the heap, and the remaining growth.
fn grown<T>(
    world: &ProcessGroup,
    run: impl FnOnce() -> Result<T, Error>,
) -> Result<(usize, usize, T), Error> {
    let meet = |what: &str| world.barrier(what).expect("all ranks are here");
    meet("before");
    let before = HEAP.current_usage();
    meet("counted");
    HEAP.reset_peak_usage();
    meet("measured");
    let result = run()?;
    meet("run");
    let (peak, left) = (HEAP.peak_usage(), HEAP.current_usage());
    meet("measured again");
    // Earlier memory may be freed meanwhile.
    let over = |bytes: usize| bytes.saturating_sub(before);
    Ok((over(peak), over(left), result))
}

/// Compiles on all ranks. Returns the peak growth of the heap, and the remaining growth.
fn of_compile(
    ranks: usize,
    division: Division,
    make: impl Fn(Mode) -> Result<Made, Error> + Send + Sync + 'static,
) -> (usize, usize) {
    let seen = on_ranks(ranks, move |world| {
        let mode = division.mode(&world)?;
        let (peak, left, _step) = grown(&world, || make(mode))?;
        Ok((peak, left))
    });
    seen[0]
}

fn drawn(mode: Mode) -> Result<Made, Error> {
    compile(Net::new, Net::loss, AdamWConfig::new().build(), mode)
}

/// Divisions, with the number of copies of the model over all their ranks, and the number of ranks that see a whole
/// value.
fn divisions(ranks: usize) -> Vec<(Division, usize, usize)> {
    let mut all = vec![
        (Division::Data(Strategy::FullShard.into()), 1, 1),
        (Division::Data(Strategy::ShardGradOp.into()), 1, 1),
        (Division::Data(DataParallel::Automatic), 1, 1),
        (Division::Data(Strategy::NoShard.into()), ranks, ranks),
        (Division::Rows, 1, ranks),
    ];
    if ranks == 4 {
        all.push((Division::Hybrid, 2, 1));
    }
    all
}

#[test]
fn values_are_made_and_divided_one_at_a_time() {
    let _turn = alone();
    for ranks in [2, 4] {
        for (division, copies, whole_on) in divisions(ranks) {
            let (peak, left) = of_compile(ranks, division, drawn);
            let held = copies * WHOLE;
            let what = format!("{division:?} on {ranks} ranks: {peak} bytes, {left} left");
            assert!((held..held + BOOKS).contains(&left), "{what}, {held} held");
            // The temporary memory of drawing a value, and on each rank that sees it whole, the received bytes and its
            // tensor.
            assert!(peak <= held + (1 + 2 * whole_on) * LAYER + BOOKS, "{what}");
        }
    }
}

/// A module with the user's own values is dropped one parameter after the other.
#[test]
fn existing_values_are_dropped_one_at_a_time() {
    let _turn = alone();
    let ready = |device: &Device| {
        let net = Net::new(device);
        if *device == Device::flex() {
            net.layers.iter().for_each(|layer| drop(layer.weight.val()));
        }
        net
    };
    let make = move |mode| compile(ready, Net::loss, AdamWConfig::new().build(), mode);
    for ranks in [2, 4] {
        let (peak, left) = of_compile(ranks, Division::Data(Strategy::FullShard.into()), make);
        let what = format!("{peak} bytes, {left} left");
        assert!((WHOLE..WHOLE + BOOKS).contains(&left), "{what}");
        // The module, and the shards of the first of its parameters.
        assert!(peak <= WHOLE + 3 * LAYER + BOOKS, "{what}");
    }
}

#[test]
fn values_read_from_files_are_never_initialized() {
    let _turn = alone();
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let init = |device: &Device| Net {
        layers: Net::new(device)
            .layers
            .into_iter()
            .map(|mut layer| {
                let shape = layer.weight.lazy_shape();
                let dims = [shape[0], shape[1]];
                let make = move |device: &Device, is_trained: bool| {
                    MADE.fetch_add(1, Relaxed);
                    Tensor::zeros(dims, device).set_require_grad(is_trained)
                };
                let (id, device) = (ParamId::new(), layer.weight.lazy_device());
                layer.weight = Param::uninitialized(id, make, device, true, Shape::from(dims));
                layer
            })
            .collect(),
    };
    for ranks in [2, 4] {
        for (division, copies, _) in divisions(ranks) {
            MADE.store(0, Relaxed);
            let make = move |mode| {
                let read = |shard: &ShardSpec<'_>| {
                    let values = vec![0.5f32; shard.region.len()];
                    Ok::<_, Error>(Some(TensorData::new(values, shard.shape.clone())))
                };
                compile_from(init, read, Net::loss, AdamWConfig::new().build(), mode)
            };
            let (peak, left) = of_compile(ranks, division, make);
            let held = copies * WHOLE;
            let what = format!("{division:?} on {ranks} ranks: {peak} bytes, {left} left");
            assert!((held..held + BOOKS).contains(&left), "{what}, {held} held");
            // The parts that the ranks are reading, and padding.
            assert!(peak <= held + 2 * copies * LAYER + BOOKS, "{what}");
            assert_eq!(MADE.load(Relaxed), 0, "{division:?} on {ranks} ranks");
        }
    }
}

#[test]
fn adapters_leave_the_weights_lazy() {
    let _turn = alone();
    let init = |device: &Device| {
        Net::new(device).apply_reparameterization(LazyLora::new(Lora::new(4, 8.0)))
    };
    let make = move |mode| compile(init, Net::loss, AdamWConfig::new().build(), mode);
    for ranks in [2, 4] {
        let (peak, left) = of_compile(ranks, Division::Data(Strategy::FullShard.into()), make);
        let what = format!("{peak} bytes, {left} left on {ranks} ranks");
        assert!((WHOLE..WHOLE + BOOKS).contains(&left), "{what}");
        assert!(peak <= WHOLE + 3 * LAYER + BOOKS, "{what}");
    }
}

/// Between forward and backward there is no weight into which an adapter is merged. In backward the only whole
/// gradients belong to the units in use.
#[test]
fn a_step_of_adapters_holds_few_merged_weights() {
    let _turn = alone();
    let init = |device: &Device| {
        Net::new(device).apply_reparameterization(LazyLora::new(Lora::new(4, 8.0)))
    };
    for ranks in [2, 4] {
        let seen = on_ranks(ranks, move |world| {
            let mode = Division::Data(Strategy::FullShard.into()).mode(&world)?;
            let mut step = compile(init, Net::loss, AdamWConfig::new().build(), mode)?;
            let batch = Tensor::ones([1, DIM], &Device::flex());
            step.step(1e-3, &batch)?;
            let (peak, _, _) = grown(&world, || step.step(1e-3, &batch))?;
            Ok(peak)
        });
        let peak = seen[0];
        // On each rank the weights in use and the next ones, one of them merged, and a gradient.
        let most = ranks * 7 * LAYER + BOOKS;
        assert!(
            peak <= most,
            "{peak} bytes on {ranks} ranks, {} layers",
            peak / LAYER
        );
    }
}

/// The first graph decides the placements. Parameters that it divides differently are whole one at a time.
#[test]
fn placements_are_taken_up_one_parameter_at_a_time() {
    let _turn = alone();
    for ranks in [2, 4] {
        let seen = on_ranks(ranks, |world| {
            let mut step = drawn(Division::Data(DataParallel::Automatic).mode(&world)?)?;
            // So few rows that moving them costs less than moving weights.
            let batch = Tensor::ones([1, DIM], &Device::flex());
            let (peak, left, _) = grown(&world, || step.compile_for(1e-3, &batch))?;
            let paths = step.parameters().iter().map(|spec| spec.path.clone());
            let paths: Vec<_> = paths.collect();
            let mut is_cut = true;
            for path in paths {
                is_cut &= !step.layout(&path)?.is_whole();
            }
            Ok((peak, left, is_cut))
        });
        let (peak, left, is_cut) = seen[0];
        assert!(is_cut, "the batch decides for parts");
        let what = format!("{peak} bytes, {left} left on {ranks} ranks");
        // The tables hold the layouts of four ranks.
        assert!(left <= BOOKS + LAYER / 2, "{what}");
        // A whole parameter on each rank, the parts from which it is created, and the parts that are created from it.
        assert!(peak <= (ranks + 2) * LAYER + BOOKS, "{what}");
    }
}

/// An evaluation before the first step takes the values as they are, and returns them.
#[test]
fn an_evaluation_before_the_first_step_copies_nothing() {
    let _turn = alone();
    let seen = on_ranks(2, |world| {
        let mut step = drawn(Division::Data(Strategy::FullShard.into()).mode(&world)?)?;
        let before = step.parameter("layers.3.weight")?;
        let mut mean = Evaluation::new(Net::new, Net::loss);
        let batch = Tensor::ones([1, DIM], &Device::flex());
        let (peak, left, first) = grown(&world, || step.evaluate(&mut mean, &batch))?;
        let again = step.evaluate(&mut mean, &batch)?;
        let (first, again) = (first.into_scalar::<f32>(), again.into_scalar::<f32>());
        assert_eq!(first.to_bits(), again.to_bits());
        assert_eq!(step.parameter("layers.3.weight")?, before);
        // The step continues from the same values.
        let loss = step.step(1e-3, &batch)?;
        assert!(
            (loss - f64::from(first)).abs() < 1e-6 * loss.abs(),
            "{loss} {first}"
        );
        Ok((peak, left))
    });
    let (peak, left) = seen[0];
    let what = format!("{peak} bytes, {left} left");
    // On each rank the layer in use, and the next one.
    assert!(peak <= 5 * LAYER + BOOKS, "{what}");
    assert!(left <= 4 * LAYER + BOOKS, "{what}");
}
