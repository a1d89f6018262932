//! Optimizer state in files, with the same values and memory for only one unit's state.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::{GroupRendezvous, SaveRequest, TrainingState, save_step};
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward, fully_shard,
    launch, resume, save,
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

/// AdamW with three values for each parameter.
fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_amsgrad(true).init()
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

fn build(
    world: &ProcessGroup,
    num_layers: usize,
    side: usize,
    device: &Device,
) -> Result<Net, Error> {
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let net = Net::new(num_layers, side, device);
    Ok(fully_shard(net, &mesh, policy())?)
}

fn policy() -> ShardPolicy {
    ShardPolicy::new().units(["layers.*"]).prefetch(0)
}

enum Either {
    Plain(ModuleOptimizer),
    Files(FileBackedOptimizer),
}

impl Either {
    fn step(&mut self, net: Net, gradients: burn::optim::GradientsParams) -> Result<Net, Error> {
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
            let values = param.base().into_data().try_to_vec::<f32>();
            self.0
                .extend(values.expect("f32").into_iter().map(f32::to_bits));
        }
    }
}

/// Bits of this rank's shards after each of five steps, of layers with `side` rows.
fn trained(
    ranks: usize,
    side: usize,
    policy: &ShardPolicy,
    folder: Option<&Path>,
) -> Vec<Vec<Vec<u32>>> {
    let (policy, folder) = (policy.clone(), folder.map(Path::to_owned));
    on_ranks(ranks, move |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let mut net = fully_shard(Net::new(3, side, &device), &mesh, policy.clone())?;
        // Equal in both runs, whatever the seed.
        net = net.map(&mut Ramp::default());
        let mut optimizer = match &folder {
            None => Either::Plain(optimizer()),
            Some(folder) => {
                Either::Files(FileBackedOptimizer::new(optimizer(), folder, world.rank())?)
            }
        };
        let mut seen = Vec::new();
        for step in 0..5 {
            let gradients = backward(net.loss(world.rank(), step, &device), &net)?;
            net = optimizer.step(net, gradients)?;
            let mut bits = Bits::default();
            net.visit(&mut bits);
            seen.push(bits.0);
        }
        Ok(seen)
    })
}

/// Values by position in the shard.
#[derive(Default)]
struct Ramp(usize);

impl burn::module::ModuleMapper for Ramp {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 1 {
            return param;
        }
        self.0 += 1;
        let offset = self.0;
        param.map(|old| {
            let value = |i: usize| ((i * 5 + offset * 3) % 11) as f32 / 40.0 - 0.1;
            let values: Vec<f32> = (0..old.shape().num_elements()).map(value).collect();
            let data = burn::tensor::TensorData::new(values, old.shape());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}

#[test]
fn results_match_the_plain_optimizer_bit_for_bit() {
    let _turn = alone();
    // With one row, some ranks hold nothing of the weights, and with sharded vectors nothing of the unit.
    let cases = [(1, 7), (2, 7), (3, 7), (2, 1), (3, 1)];
    let cases = cases.map(|(ranks, side)| (ranks, side, policy()));
    let sharded = [(2, 1), (4, 1), (4, 2)];
    let sharded = sharded.map(|(ranks, side)| (ranks, side, policy().shard_vectors(true)));
    for (ranks, side, policy) in cases.into_iter().chain(sharded) {
        let folder = tempfile::tempdir().expect("a folder");
        let plain = trained(ranks, side, &policy, None);
        let files = trained(ranks, side, &policy, Some(folder.path()));
        assert_eq!(plain, files, "{ranks} ranks, {side} rows, {policy:?}");
        assert_ne!(plain[0][0], plain[0][4], "it trains");
        let left = std::fs::read_dir(folder.path()).expect("there").count();
        assert_eq!(left, 0, "nothing is left behind");
    }
}

#[test]
fn state_goes_through_records_into_another_run() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    on_ranks(2, move |world| {
        let device = device();
        let mut net = build(&world, 3, 7, &device)?;
        let mut one = FileBackedOptimizer::new(optimizer(), path.join("one"), world.rank())?;
        let mut other = FileBackedOptimizer::new(optimizer(), path.join("other"), world.rank())?;
        let gradients = backward(net.loss(world.rank(), 0, &device), &net)?;
        net = one.step(1e-2, net, gradients)?;
        for record in one.records() {
            let (unit, record) = record?;
            other.restore(unit, record)?;
        }
        assert_eq!(other.records().count(), 3, "one for each layer");
        let shards = |net: &Net| {
            let mut bits = Bits::default();
            net.visit(&mut bits);
            bits.0
        };
        let gradients = backward(net.loss(world.rank(), 1, &device), &net)?;
        let went_on = one.step(1e-2, net.clone(), gradients)?;
        let gradients = backward(net.loss(world.rank(), 1, &device), &net)?;
        let resumed = other.step(1e-2, net, gradients)?;
        assert_eq!(shards(&went_on), shards(&resumed));
        Ok(())
    });
}

/// This rank's shards.
fn shards(net: &Net) -> Vec<u32> {
    let mut bits = Bits::default();
    net.visit(&mut bits);
    bits.0
}

/// Runs steps `from..until` with the optimizer in memory, or in files of `scratch`, from the newest step in `folder`,
/// and saves there again. With files, a step runs between the snapshot and its save, which must not affect the save.
fn saved_and_resumed(
    (ranks, side): (usize, usize),
    folder: &Path,
    scratch: Option<&Path>,
    until: u64,
) -> Vec<Vec<u32>> {
    let (folder, scratch) = (folder.to_owned(), scratch.map(Path::to_owned));
    on_ranks(ranks, move |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let mut net = build(&world, 3, side, &device)?.map(&mut Ramp::default());
        let Some(scratch) = &scratch else {
            let resumed = resume(&folder, net, optimizer(), &mesh)?;
            let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
            for step in resumed.step..until {
                let gradients = backward(net.loss(0, step as usize, &device), &net)?;
                net = optimizer.step(1e-2, net, gradients);
            }
            save(&folder, until, &net, &optimizer, &mesh)?;
            return Ok(shards(&net));
        };
        let checkpoints = Checkpoints::new(&folder);
        let mut optimizer = FileBackedOptimizer::new(optimizer(), scratch, world.rank())?;
        let newest = checkpoints.steps().expect("reads").last().copied();
        let mut first = 0;
        if let Some(newest) = newest {
            let step = checkpoints.open(newest).expect("opens");
            net = optimizer.restore_step(net, &step, |_| true)?;
            first = newest;
        }
        world.barrier("all have read")?;
        for step in first..until {
            let gradients = backward(net.loss(0, step as usize, &device), &net)?;
            net = optimizer.step(1e-2, net, gradients)?;
        }
        let mut taken = optimizer.snapshot(&net, mesh.mesh(), "shard", |_| true)?;
        assert_eq!(taken.snapshot.not_finite(&taken.plan, world.rank()), None);
        let gradients = backward(net.loss(0, 99, &device), &net)?;
        drop(optimizer.step(1e-2, net.clone(), gradients)?);
        let training = TrainingState {
            step: until,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        let request = SaveRequest::new(taken.plan, training);
        let mut rendezvous = GroupRendezvous::new(world);
        save_step(&checkpoints, &request, &mut taken.snapshot, &mut rendezvous)
            .expect("it is saved");
        Ok(shards(&net))
    })
}

/// State moves from files to files, to memory and back, on other ranks, some of which hold nothing. The result has the
/// bits of a training run in memory that never stopped. Nothing is left in the folders of the files.
#[test]
fn steps_are_saved_from_files_and_read_into_them() {
    let _turn = alone();
    for side in [7, 1] {
        let whole = tempfile::tempdir().expect("a folder");
        let want = saved_and_resumed((2, side), whole.path(), None, 9);
        for legs in [
            [true, true, true],
            [true, false, true],
            [false, true, false],
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let scratch = tempfile::tempdir().expect("a folder");
            let mut got = Vec::new();
            for (leg, (ranks, in_files)) in [2, 4, 2].into_iter().zip(legs).enumerate() {
                let scratch = in_files.then_some(scratch.path());
                let until = 3 * (leg as u64 + 1);
                got = saved_and_resumed((ranks, side), folder.path(), scratch, until);
            }
            assert_eq!(got, want, "{legs:?} of {side} rows");
            let left = std::fs::read_dir(scratch.path()).expect("there").count();
            assert_eq!(left, 0, "nothing is left behind");
        }
    }
}

/// The memory holds one tensor of the state at a time while it is saved, and one unit's state while it is
/// read.
#[test]
fn saving_and_reading_keep_the_state_out_of_memory() {
    let _turn = alone();
    let scratch = tempfile::tempdir().expect("a folder");
    let path = scratch.path().to_owned();
    let grown = on_ranks(1, move |world| {
        let device = device();
        let mut net = build(&world, NUM_LAYERS, SIDE, &device)?;
        let mesh = Mesh::line("shard", 1)?;
        let mut optimizer = FileBackedOptimizer::new(optimizer(), path.join("files"), 0)?;
        let gradients = backward(net.loss(0, 0, &device), &net)?;
        net = optimizer.step(1e-2, net, gradients)?;
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        let mut taken = optimizer.snapshot(&net, &mesh, "shard", |_| true)?;
        assert_eq!(taken.snapshot.not_finite(&taken.plan, 0), None);
        let training = TrainingState {
            step: 1,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        let checkpoints = Checkpoints::new(path.join("steps"));
        let request = SaveRequest::new(taken.plan, training);
        let mut rendezvous = GroupRendezvous::new(world);
        save_step(&checkpoints, &request, &mut taken.snapshot, &mut rendezvous)
            .expect("it is saved");
        let saving = HEAP.peak_usage() - before;
        let step = checkpoints.open(1).expect("opens");
        drop(taken.snapshot);
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        // The restored parameters also take memory: the previous ones exist until then.
        drop(optimizer.restore_step(net, &step, |_| true)?);
        Ok((saving, HEAP.peak_usage() - before))
    });
    let (saving, reading) = grown[0];
    println!(
        "state {STATE}, parameters {PARAMETERS}, while saving {saving}, while reading {reading}"
    );
    assert!(saving < STATE / 8, "{saving} of {STATE}");
    assert!(reading < PARAMETERS + STATE / 8, "{reading} of {STATE}");
}

#[test]
fn a_file_that_changes_in_one_bit_ends_the_step() {
    let _alone = alone();
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().to_owned();
    let says = on_ranks(1, move |world| {
        let device = device();
        let mut net = build(&world, 3, 5, &device)?;
        let mut optimizer = FileBackedOptimizer::new(optimizer(), &folder, 0)?;
        net = optimizer.step(1e-2, net.clone(), backward(net.loss(0, 0, &device), &net)?)?;
        let mut files: Vec<_> = std::fs::read_dir(folder.join("rank-0")).unwrap().collect();
        let file = files.pop().expect("a file").unwrap().path();
        let right = std::fs::read(&file).unwrap();
        let mut says = Vec::new();
        // The numbers of the state are at the end, and any reader accepts them.
        for place in [0, right.len() / 2, right.len() - 2] {
            let mut wrong = right.clone();
            wrong[place] ^= 2;
            std::fs::write(&file, wrong).unwrap();
            let gradients = backward(net.loss(0, 1, &device), &net)?;
            let stepped = optimizer.step(1e-2, net.clone(), gradients);
            says.push(stepped.map(drop).map_err(|error| error.to_string()));
            let records: Result<Vec<_>, _> = optimizer.records().collect();
            says.push(records.map(drop).map_err(|error| error.to_string()));
        }
        Ok(says)
    });
    for said in says.into_iter().flatten() {
        let text = said.expect_err("other bytes");
        assert!(text.contains("changed after they were written"), "{text}");
    }
}

#[test]
fn a_folder_of_another_run_is_refused() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let rank = folder.path().join("rank-0");
    std::fs::create_dir(&rank).expect("made");
    std::fs::write(rank.join("notes.txt"), "mine").expect("written");
    std::fs::write(rank.join("00000-root.bpk"), "old").expect("written");
    let refused = || -> String {
        let new = FileBackedOptimizer::new(optimizer(), folder.path(), 0);
        let cleaned = FileBackedOptimizer::clean(folder.path(), 0);
        assert_eq!(
            new.as_ref().err().map(ToString::to_string),
            cleaned.err().map(|error| error.to_string())
        );
        new.expect_err("refused").to_string()
    };
    let message = refused();
    assert!(message.contains("such as notes.txt"), "{message}");
    assert!(message.contains("no other run uses"), "{message}");
    assert_eq!(std::fs::read_dir(&rank).expect("there").count(), 2);
    // The remaining state belongs to a dead run, because the folder is not locked.
    std::fs::remove_file(rank.join("notes.txt")).expect("removed");
    let own = FileBackedOptimizer::new(optimizer(), folder.path(), 0).expect("free");
    assert_eq!(std::fs::read_dir(&rank).expect("there").count(), 0);
    let message = refused();
    assert!(message.contains("another run is using it"), "{message}");
    drop(own);
    FileBackedOptimizer::clean(folder.path(), 0).expect("nothing is there");
    assert!(!rank.exists());
}

/// Large enough that a product's own memory, which depends on the machine's caches, is small in comparison.
const NUM_LAYERS: usize = 48;
const SIDE: usize = 256;
/// Size of the parameters in bytes.
const PARAMETERS: usize = NUM_LAYERS * (SIDE * SIDE + SIDE) * size_of::<f32>();
/// Bytes of the optimizer's state: three values for each parameter.
const STATE: usize = 3 * PARAMETERS;
/// Memory that the process may use: parameters, gradients, and less than as much again for everything else.
const ALLOWED: usize = STATE - PARAMETERS / 4;

/// The peak memory of training on one rank, in bytes.
fn peak(folder: Option<&Path>) -> usize {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let folder = folder.map(Path::to_owned);
    on_ranks(1, move |world| {
        let device = device();
        let mut net = build(&world, NUM_LAYERS, SIDE, &device)?;
        let mut optimizer = match &folder {
            None => Either::Plain(optimizer()),
            Some(folder) => Either::Files(FileBackedOptimizer::new(optimizer(), folder, 0)?),
        };
        for step in 0..3 {
            let gradients = backward(net.loss(0, step, &device), &net)?;
            net = optimizer.step(net, gradients)?;
        }
        if let Either::Files(optimizer) = &optimizer {
            assert!(optimizer.file_bytes() as usize >= STATE);
        }
        Ok(())
    });
    HEAP.peak_usage() - before
}

#[test]
fn optimizer_state_may_exceed_the_memory_limit() {
    let _turn = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let with_files = peak(Some(folder.path()));
    let in_memory = peak(None);
    println!("state {STATE}, allowed {ALLOWED}, with files {with_files}, in memory {in_memory}");
    const { assert!(ALLOWED < STATE) };
    assert!(with_files <= ALLOWED, "{with_files} of {ALLOWED} bytes");
    assert!(in_memory > ALLOWED, "{in_memory} of {ALLOWED} bytes");
}
