//! Shards and gradients in files, with the same values and memory for only the units in use.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::compile::LossScaling;
use burn_fsdp::internals::checkpoint::{GroupRendezvous, SaveRequest, TrainingState, save_step};
use burn_fsdp::internals::state::full_state;
use burn_fsdp::internals::testing::{At, Fault, How};
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::state::{WriteBack, moving_average, summon_full_params};
use burn_fsdp::{
    Check, Clip, Error, LaunchConfig, LossScaler, Mesh, ProcessGroup, ProcessMesh, ShardPolicy,
    Strategy, backward, catch, clip_grad_norm, fully_shard, launch, no_sync, resume, save,
};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Locks the allocator's counts, which cover the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(num_layers: usize, side: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(side, side).init(device);
        Self {
            layers: (0..num_layers).map(layer).collect(),
        }
    }

    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let side = self.layers[0].weight.dims()[0];
        let x = Tensor::<2>::ones([2, side], device) * (1.0 + (rank + step) as f32 / 8.0);
        let layers = self.layers.iter();
        let x = layers.fold(x, |x, layer| x.clone() + layer.forward(x).tanh());
        x.powf_scalar(2.0).mean()
    }
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

fn policy() -> ShardPolicy {
    ShardPolicy::new().units(["layers.*"]).prefetch(0)
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_amsgrad(true).init()
}

fn momentum() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

/// Values by position.
#[derive(Default)]
struct Ramp(usize);

impl ModuleMapper for Ramp {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let offset = self.0;
        param.map(|old| {
            let value = |i: usize| ((i * 5 + offset * 3) % 11) as f32 / 40.0 - 0.1;
            let values: Vec<f32> = (0..old.shape().num_elements()).map(value).collect();
            let (data, trains) = (TensorData::new(values, old.shape()), old.is_require_grad());
            Tensor::from_data(data, &old.device()).set_require_grad(trains)
        })
    }
}

/// A change of a training run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Variant {
    Usual,
    /// The second layer is frozen.
    Frozen,
    Clipped,
    Scaled,
    /// Each step adds two backwards' gradients.
    Accumulated,
    /// Two groups of ranks hold the same shards.
    Hybrid,
}

#[derive(Clone)]
struct Case {
    ranks: usize,
    side: usize,
    policy: ShardPolicy,
    optimizer: fn() -> ModuleOptimizer,
    variant: Variant,
}

impl Case {
    fn net(&self, device: &Device) -> Net {
        let mut net = Net::new(3, self.side, device).map(&mut Ramp::default());
        if self.variant == Variant::Frozen {
            net.layers[1] = net.layers[1].clone().no_grad();
        }
        net
    }

    fn gradients(&self, net: &Net, rank: usize, step: usize) -> Result<GradientsParams, Error> {
        let device = device();
        let loss = || net.loss(rank, step, &device);
        Ok(match self.variant {
            Variant::Usual | Variant::Frozen | Variant::Hybrid => backward(loss(), net)?,
            Variant::Clipped => {
                clip_grad_norm(net, backward(loss(), net)?, Clip::to(0.05))?.gradients
            }
            Variant::Scaled => {
                let mut scaler = LossScaler::new(LossScaling::default())?;
                let gradients = backward(scaler.scale(loss()), net)?;
                scaler.unscale(net, gradients)?.expect("finite gradients")
            }
            Variant::Accumulated => {
                no_sync(net, || backward(loss(), net))??;
                backward(net.loss(rank, step + 7, &device), net)?
            }
        })
    }
}

/// The optimizer, with its state in memory or in files.
enum Either {
    Plain(ModuleOptimizer),
    Files(FileBackedOptimizer),
}

impl Either {
    fn step(&mut self, net: Net, gradients: GradientsParams) -> Result<Net, Error> {
        match self {
            Self::Plain(optimizer) => Ok(optimizer.step(1e-2, net, gradients)),
            Self::Files(optimizer) => Ok(optimizer.step(1e-2, net, gradients)?),
        }
    }
}

#[derive(Default)]
struct Bits(Vec<u32>);

impl ModuleVisitor for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Stand-ins of one element carry no information.
        if D == 1 {
            let values = param.base().into_data().convert::<f32>();
            let values = values.try_to_vec::<f32>().expect("f32");
            self.0.extend(values.into_iter().map(f32::to_bits));
        }
    }
}

/// This rank's shards.
fn shards(net: &Net) -> Vec<u32> {
    let mut bits = Bits::default();
    net.visit(&mut bits);
    bits.0
}

/// Bits of this rank's shards after each of four steps, and at the end the whole parameters on rank 0.
type Trained = (Vec<Vec<u32>>, Vec<Vec<f32>>);

fn trained(case: &Case, state: Option<&Path>) -> Vec<Trained> {
    let (case, state) = (case.clone(), state.map(Path::to_owned));
    on_ranks(case.ranks, move |world| {
        let device = device();
        let mesh = match case.variant {
            Variant::Hybrid => {
                let grid = Mesh::new([("replicate", 2), ("shard", case.ranks / 2)])?;
                ProcessMesh::new(&world, grid)?
            }
            _ => line(&world)?,
        };
        let mut net = fully_shard(case.net(&device), &mesh, case.policy.clone())?;
        let mut optimizer = match &state {
            None => Either::Plain((case.optimizer)()),
            Some(folder) => Either::Files(FileBackedOptimizer::new(
                (case.optimizer)(),
                folder,
                world.rank(),
            )?),
        };
        let mut seen = Vec::new();
        for step in 0..4 {
            let gradients = case.gradients(&net, world.rank(), step)?;
            net = optimizer.step(net, gradients)?;
            seen.push(shards(&net));
        }
        let mut whole = Vec::new();
        full_state(&net, |tensor| {
            let (words, _) = tensor.bytes.as_chunks::<4>();
            whole.push(words.iter().map(|word| f32::from_ne_bytes(*word)).collect());
        })?;
        Ok((seen, whole))
    })
}

/// The parameters after the same steps in plain Burn, on the batches of all ranks.
fn plain(case: &Case) -> Vec<Vec<f32>> {
    let device = device();
    let mut net = case.net(&device);
    let mut optimizer = (case.optimizer)();
    for step in 0..4 {
        let steps = match case.variant {
            Variant::Accumulated => vec![step, step + 7],
            _ => vec![step],
        };
        let losses = steps
            .iter()
            .flat_map(|&step| (0..case.ranks).map(move |rank| (rank, step)));
        let losses = losses.map(|(rank, step)| net.loss(rank, step, &device));
        let loss = losses.reduce(|sum, next| sum + next).expect("a rank");
        let gradients = (loss / case.ranks as f32).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    #[derive(Default)]
    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().try_to_vec();
            self.0.push(values.expect("f32"));
        }
    }
    let mut values = Values::default();
    net.visit(&mut values);
    values.0
}

fn cases() -> Vec<Case> {
    let usual = |ranks, side| Case {
        ranks,
        side,
        policy: policy(),
        optimizer: adamw,
        variant: Variant::Usual,
    };
    // With one row, some ranks hold nothing of the weights.
    let shapes = [(1, 7), (2, 7), (3, 7), (4, 5), (3, 1)];
    let mut cases: Vec<_> = shapes.map(|(ranks, side)| usual(ranks, side)).into();
    for variant in [
        Variant::Frozen,
        Variant::Clipped,
        Variant::Scaled,
        Variant::Accumulated,
    ] {
        cases.extend([1, 3].map(|ranks| Case {
            variant,
            ..usual(ranks, 7)
        }));
    }
    let policies = [
        policy().strategy(Strategy::ShardGradOp),
        policy().strategy(Strategy::NoShard),
        policy().shard_vectors(true),
        policy().prefetch(1),
        policy().one_owner(["**.weight"]),
        policy().gather_in_8_bits(true),
    ];
    cases.extend(policies.map(|policy| Case {
        policy,
        ..usual(2, 5)
    }));
    cases.push(Case {
        policy: policy().replicate_axis("replicate"),
        variant: Variant::Hybrid,
        ..usual(4, 5)
    });
    cases.extend([1, 2, 4].map(|ranks| Case {
        optimizer: momentum,
        ..usual(ranks, 7)
    }));
    cases
}

#[test]
fn results_match_shards_in_memory_bit_for_bit_and_plain_burn() {
    let _turn = alone();
    for case in cases() {
        let name = format!("{} ranks, {:?}", case.ranks, case.variant);
        let (files, state) = (tempfile::tempdir(), tempfile::tempdir());
        let (files, state) = (files.expect("a folder"), state.expect("a folder"));
        let in_memory = trained(&case, None);
        assert_ne!(in_memory[0].0[0], in_memory[0].0[3], "{name}: it trains");
        for patterns in [&["**"][..], &["layers.0", "layers.2.weight"]] {
            let in_files = Case {
                policy: case
                    .policy
                    .clone()
                    .in_files(files.path(), patterns.to_vec()),
                ..case.clone()
            };
            for state in [None, Some(state.path())] {
                let got = trained(&in_files, state);
                assert_eq!(got, in_memory, "{name}, {patterns:?}, {:?}", case.policy);
            }
        }
        let left = fs::read_dir(files.path()).expect("a folder").count();
        assert_eq!(left, 0, "the files have no names");
        // The oracle does not clip or round.
        let is_exact = !format!("{:?}", case.policy).contains("gathers_in_8_bits: true");
        if case.variant != Variant::Clipped && is_exact {
            let want = plain(&case);
            assert_eq!(want.len(), in_memory[0].1.len());
            for (got, want) in in_memory[0].1.iter().zip(&want) {
                let close =
                    |(got, want): (&f32, &f32)| (got - want).abs() <= 2e-5 + 1e-4 * want.abs();
                assert!(got.iter().zip(want).all(close), "{name}: {got:?}, {want:?}");
            }
        }
    }
}

/// Copies of a module share files until one of them changes, and averages are kept in files.
#[test]
fn clones_averages_and_written_back_parameters_match_those_in_memory() {
    let _turn = alone();
    let run = |ranks, dtype, folder: Option<&Path>| {
        let folder = folder.map(Path::to_owned);
        on_ranks(ranks, move |world| {
            let device = device();
            let policy = match &folder {
                Some(folder) => policy().in_files(folder, ["**"]),
                None => policy(),
            };
            let net = Net::new(3, 7, &device).map(&mut Ramp::default());
            let net = net.map(&mut Cast(dtype));
            let mut net = fully_shard(net, &line(&world)?, policy)?;
            let (first, mut average) = (net.clone(), net.clone());
            let mut optimizer = momentum();
            for step in 0..3 {
                let loss = match dtype {
                    DType::F32 => net.loss(world.rank(), step, &device),
                    _ => net.layers[0].weight.val().sum(),
                };
                let gradients = backward(loss, &net)?;
                net = optimizer.step(1e-2, net, gradients);
                average = moving_average(average, &net, 0.75)?;
            }
            let copied = average.clone();
            let valid = average.valid();
            let summoned =
                summon_full_params(net.clone(), WriteBack::Keep, |full| full.map(&mut Doubled))?;
            let kept = [&first, &net, &average, &copied, &valid, &summoned].map(shards);
            Ok((kept, shards(&valid.train())))
        })
    };
    for (ranks, dtype) in [
        (1, DType::F32),
        (3, DType::F32),
        (1, DType::BF16),
        (2, DType::BF16),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let in_memory = run(ranks, dtype, None);
        assert_eq!(run(ranks, dtype, Some(folder.path())), in_memory);
        let [first, net, average, ..] = &in_memory[0].0;
        assert!(first != net && net != average && first != average);
    }
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let (device, trains) = (old.device(), old.is_require_grad());
            let data = old.into_data().convert_dtype(self.0);
            Tensor::from_data(data, (&device, self.0)).set_require_grad(trains)
        })
    }
}

struct Doubled;

impl ModuleMapper for Doubled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| old.mul_scalar(2.0))
    }
}

/// Steps `from..until`, from the newest step in `folder`, which is then saved there.
fn saved_and_resumed(ranks: usize, folder: &Path, files: Option<&Path>, until: u64) -> Vec<f32> {
    let (folder, files) = (folder.to_owned(), files.map(Path::to_owned));
    let whole = on_ranks(ranks, move |world| {
        let (device, mesh) = (device(), line(&world)?);
        let policy = match &files {
            Some(files) => policy().in_files(files, ["**"]),
            None => policy(),
        };
        let net = Net::new(3, 7, &device).map(&mut Ramp::default());
        let net = fully_shard(net, &mesh, policy)?;
        let resumed = resume(&folder, net, adamw(), &mesh)?;
        let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
        for step in resumed.step..until {
            let gradients = backward(net.loss(0, step as usize, &device), &net)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        save(&folder, until, &net, &optimizer, &mesh)?;
        let mut whole = Vec::new();
        full_state(&net, |tensor| {
            let (words, _) = tensor.bytes.as_chunks::<4>();
            whole.extend(words.iter().map(|word| f32::from_ne_bytes(*word)));
        })?;
        Ok(whole)
    });
    whole.into_iter().next().expect("rank 0")
}

#[test]
fn steps_are_saved_from_shards_in_files_and_read_into_them() {
    let _turn = alone();
    let whole = tempfile::tempdir().expect("a folder");
    let want = saved_and_resumed(2, whole.path(), None, 9);
    for legs in [
        [true, true, true],
        [true, false, true],
        [false, true, false],
    ] {
        let (folder, files) = (tempfile::tempdir(), tempfile::tempdir());
        let (folder, files) = (folder.expect("a folder"), files.expect("a folder"));
        let mut got = Vec::new();
        for (leg, (ranks, in_files)) in [2, 4, 2].into_iter().zip(legs).enumerate() {
            let files = in_files.then_some(files.path());
            got = saved_and_resumed(ranks, folder.path(), files, 3 * (leg as u64 + 1));
        }
        assert_eq!(got, want, "{legs:?}");
    }
}

/// Large enough that a product's own memory, which depends on the machine's caches, is small in comparison.
const NUM_LAYERS: usize = 96;
const SIDE: usize = 256;
/// Size of the parameters in bytes.
const PARAMETERS: usize = NUM_LAYERS * (SIDE * SIDE + SIDE) * size_of::<f32>();

/// The peak memory of all ranks, in bytes.
#[derive(Debug)]
struct Peaks {
    /// Memory of the process, from building the module to the end of the first steps, which try the optimizer.
    start: usize,
    /// Memory of the process in a later step.
    step: usize,
    /// Growth while a step is saved.
    saving: usize,
    /// Growth while a step is restored.
    restoring: usize,
}

fn peaks(ranks: usize, patterns: &'static [&'static str]) -> Peaks {
    let scratch = tempfile::tempdir().expect("a folder");
    let path = scratch.path().to_owned();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let measured = on_ranks(ranks, move |world| {
        let (device, mesh) = (device(), line(&world)?);
        let policy = match patterns {
            [] => policy(),
            patterns => policy().in_files(&path, patterns.to_vec()),
        };
        let mut net = fully_shard(Net::new(NUM_LAYERS, SIDE, &device), &mesh, policy)?;
        let mut optimizer = FileBackedOptimizer::new(adamw(), path.join("adamw"), world.rank())?;
        let mut start = 0;
        let restart = |what| -> Result<usize, Error> {
            world.barrier(what)?;
            HEAP.reset_peak_usage();
            let now = HEAP.current_usage();
            world.barrier(what)?;
            Ok(now)
        };
        for step in 0..4 {
            if step == 3 {
                start = HEAP.peak_usage();
                restart("the first steps")?;
            }
            let gradients = backward(net.loss(world.rank(), step, &device), &net)?;
            let gradients = clip_grad_norm(&net, gradients, Clip::to(1.0))?.gradients;
            net = optimizer.step(1e-3, net, gradients)?;
        }
        world.barrier("trained")?;
        let in_step = HEAP.peak_usage();
        let held = restart("before saving")?;
        let mut taken = optimizer.snapshot(&net, mesh.mesh(), "shard", |_| true)?;
        let training_state = TrainingState {
            step: 1,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        let checkpoints = Checkpoints::new(path.join("steps"));
        let request = SaveRequest::new(taken.plan, training_state);
        let mut rendezvous = GroupRendezvous::new(world.clone());
        save_step(&checkpoints, &request, &mut taken.snapshot, &mut rendezvous).expect("saved");
        world.barrier("saved")?;
        let saving = HEAP.peak_usage() - held;
        drop(taken.snapshot);
        let step = checkpoints.open(1).expect("opens");
        let held = restart("before restoring")?;
        drop(optimizer.restore_step(net, &step, |_| true)?);
        world.barrier("restored")?;
        let restoring = HEAP.peak_usage() - held;
        Ok([start, in_step, saving, restoring])
    });
    let largest = |index: usize| measured.iter().map(|peaks| peaks[index]).max();
    let [start, step, saving, restoring] =
        [0, 1, 2, 3].map(|index| largest(index).expect("a rank"));
    Peaks {
        start: start - before,
        step: step - before,
        saving,
        restoring,
    }
}

#[test]
fn parameters_may_exceed_the_memory_limit() {
    let _turn = alone();
    for ranks in [1, 2] {
        let memory = peaks(ranks, &[]);
        let files = peaks(ranks, &["**"]);
        println!(
            "{ranks} ranks, parameters {PARAMETERS}, in memory {memory:?}, in files {files:?}"
        );
        // In memory: parameters and gradients.
        assert!(memory.step > 2 * PARAMETERS, "{memory:?}");
        // Each rank has whole units.
        assert!(files.step < ranks * PARAMETERS / 3, "{files:?}");
        assert!(files.start < memory.start / 2, "{files:?}");
        assert!(files.saving < PARAMETERS / 4, "{files:?}");
        assert!(memory.restoring > PARAMETERS / 2, "{memory:?}");
        assert!(files.restoring < PARAMETERS / 4, "{files:?}");
    }
}

/// The patterns select the part of the parameters and gradients that is in files, here 44 of 96 layers.
#[test]
fn patterns_select_the_part_that_is_in_files() {
    let _turn = alone();
    let peaks = peaks(1, &["layers.1*", "layers.2*", "layers.3*", "layers.4*"]);
    let in_memory = 2 * PARAMETERS / NUM_LAYERS * (NUM_LAYERS - 44);
    println!("{in_memory} in memory, {peaks:?}");
    assert!(peaks.step > in_memory, "{peaks:?}");
    assert!(peaks.step < in_memory + PARAMETERS / 3, "{peaks:?}");
}

/// A wrong bit in a shard is an error when the shard is gathered, also if ranks do not compare bytes.
#[test]
fn a_shard_that_changes_in_a_file_ends_the_step() {
    let _turn = alone();
    for ranks in [1, 2] {
        let run = |folder: Option<&Path>| {
            let folder = folder.map(Path::to_owned);
            let body = move |world: ProcessGroup| {
                let device = device();
                let policy = match &folder {
                    Some(folder) => policy().in_files(folder, ["**"]),
                    None => policy(),
                };
                let net = fully_shard(Net::new(3, 5, &device), &line(&world)?, policy)?;
                world.begin_step(1);
                world.set_fault(Fault::new(ranks - 1, 1, At::Shard, How::Flip));
                backward(net.loss(0, 0, &device), &net)?;
                Ok::<_, Error>(())
            };
            let config = LaunchConfig::new(ranks).check(Check::default());
            launch(config, body)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        assert_eq!(run(None), Ok(()), "nothing checks shards in memory");
        let folder = tempfile::tempdir().expect("a folder");
        let text = run(Some(folder.path())).expect_err("a flip");
        let names = [
            format!(
                "rank {}: the shard of `layers.0.weight` (unit layers.0)",
                ranks - 1
            ),
            folder.path().display().to_string(),
            "changed after they were written; check the disk, and resume".to_owned(),
        ];
        for name in names {
            assert!(text.contains(&name), "{name}: {text}");
        }
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_with_its_path() {
    let _turn = alone();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path().join("shards");
    let state = scratch.path().join("state");
    let wanted = folder.display().to_string();
    let texts = on_ranks(1, move |world| {
        let (device, mesh) = (device(), line(&world)?);
        let net = || Net::new(3, 5, &device);
        let policy = policy().in_files(&folder, ["**"]);
        let missing = fully_shard(net(), &mesh, policy.clone()).map(drop);
        fs::create_dir(&folder).expect("created");
        let net = fully_shard(net(), &mesh, policy)?;
        let gradients = || backward(net.loss(0, 0, &device), &net);
        let (one, other) = (gradients()?, gradients()?);
        let mut optimizer = FileBackedOptimizer::new(adamw(), &state, 0)?;
        fs::remove_dir(&folder).expect("it has no names");
        let in_backward = gradients().map(drop);
        let in_step = catch(|| adamw().step(1e-2, net.clone(), one)).map(drop);
        let in_files = optimizer.step(1e-2, net.clone(), other).map(drop);
        let in_average = moving_average(net.clone(), &net, 0.5).map(drop);
        // Nothing is left half done.
        fs::create_dir(&folder).expect("created");
        adamw().step(1e-2, net.clone(), gradients()?);
        let results = [missing, in_backward, in_step, in_files, in_average];
        Ok(results.map(|result| result.map_err(|error| error.to_string())))
    });
    for (text, kind) in texts[0]
        .iter()
        .zip(["shard", "gradient", "shard", "shard", "shard"])
    {
        let text = text.as_ref().expect_err("no folder");
        let what = format!("rank 0: the {kind} of `layers.");
        for name in [what.as_str(), &wanted, "create the folder, or name another"] {
            assert!(text.contains(name), "{name}: {text}");
        }
    }
}

#[test]
fn patterns_that_match_nothing_are_rejected() {
    let _turn = alone();
    on_ranks(1, |world| {
        let policy = policy().in_files(std::env::temp_dir(), ["blocks.*"]);
        let wrapped = fully_shard(Net::new(2, 3, &device()), &line(&world)?, policy);
        let text = wrapped.map(drop).expect_err("no blocks").to_string();
        assert!(text.contains("pattern `blocks.*` matches no"), "{text}");
        Ok(())
    });
}
