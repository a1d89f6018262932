//! The table of resumes: every optimizer, with every type of parameters, through every call that saves and resumes. A
//! resumed run has the bits of a run without the stop, or it is rejected before a step is trained; `snapshot`, which
//! does not see the beginning, rejects on its first call.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{
    AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, OptimizerRecord, SgdConfig,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{CompiledStep, Mode, compile, restore_compiled, snapshot_compiled};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch, resume, save,
};

use crate::saving::save_taken;

use crate::every::{ForEach, Needs, for_each};

const CUT: u64 = 3;
const STEPS: u64 = 6;
const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Two layers, and a scale between them that may have a different type.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    scale: Param<Tensor<1>>,
    second: Linear,
}

impl Net {
    /// Creates the model with the first type, and its scale with the second.
    fn of(device: &Device, [dtype, scale]: [DType; 2]) -> Self {
        fn param<const D: usize>(
            seed: usize,
            shape: [usize; D],
            options: (&Device, DType),
        ) -> Param<Tensor<D>> {
            let value = |i: usize| ((i * 37 + seed) % 101) as f32 / 90.0 - 0.5;
            let len = shape.iter().product();
            let values: Vec<f32> = (0..len).map(value).collect();
            let tensor = Tensor::from_data(TensorData::new(values, shape), options);
            Param::initialized(ParamId::new(), tensor.require_grad())
        }
        let layer = |seed: usize, [from, to]: [usize; 2]| {
            let mut layer = LinearConfig::new(from, to).init(device);
            layer.weight = param(seed, [from, to], (device, dtype));
            layer.bias = Some(param(seed + 50, [to], (device, dtype)));
            layer
        };
        Self {
            first: layer(1, [5, 7]),
            scale: param(7, [7], (device, scale)),
            second: layer(5, [7, 3]),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let dtype = self.first.weight.val().dtype();
        let hidden = self.first.forward(x.cast(dtype)).tanh();
        let scale = self.scale.val();
        let hidden = hidden.cast(scale.dtype()) * scale.add_scalar(1.0).unsqueeze();
        let y = self.second.forward(hidden.cast(dtype));
        y.sub_scalar(0.25).square().mean()
    }
}

/// The same on every rank.
fn batch(step: u64, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 29 + step as usize * 13) % 53) as f32 / 26.0 - 1.0;
    let values: Vec<f32> = (0..20).map(value).collect();
    Tensor::from_data(TensorData::new(values, [4, 5]), device)
}

fn number(loss: Tensor<1>) -> f64 {
    loss.cast(DType::F64).into_scalar::<f64>()
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

/// Returns the layout of ranks: `ranks` in a line, or two copies of half as many.
fn mesh(world: &ProcessGroup, is_hybrid: bool) -> Result<ProcessMesh, Error> {
    let layout = if is_hybrid {
        Mesh::new([("replicate", 2), ("shard", world.size() / 2)])?
    } else {
        Mesh::line("shard", world.size())?
    };
    Ok(ProcessMesh::new(world, layout)?)
}

fn sharded(mesh: &ProcessMesh, types: [DType; 2]) -> Result<Net, Error> {
    let mut policy = ShardPolicy::new().units(["first"]);
    if mesh.mesh().axes().len() > 1 {
        policy = policy.replicate_axis("replicate");
    }
    Ok(fully_shard(Net::of(&device(), types), mesh, policy)?)
}

/// A way of saving and resuming.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    /// `save` and `resume`.
    Resume,
    /// `snapshot`, `save_step`, `restore`.
    Snapshot,
    /// A compiled step.
    Compiled,
}

/// A part of a run.
#[derive(Clone)]
struct Part<O> {
    optimizer: O,
    rate: f64,
    types: [DType; 2],
    call: Call,
    ranks: usize,
    is_hybrid: bool,
    /// The folder of steps, with the step to continue from if it is not the first.
    folder: Arc<Path>,
    steps: std::ops::Range<u64>,
}

/// Trains a part, saves after it, and returns the losses.
fn train<O: Optimizer>(part: &Part<O>) -> Result<Vec<f64>, String> {
    let (part, ranks) = (part.clone(), part.ranks);
    let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
        let mesh = mesh(&world, part.is_hybrid)?;
        let (start, end) = (part.steps.start, part.steps.end);
        let folder = &*part.folder;
        let mut losses = Vec::new();
        if part.call == Call::Compiled {
            let types = part.types;
            let mut step: CompiledStep<Tensor<2>> = compile(
                move |device: &Device| Net::of(device, types),
                |net: &Net, x: Tensor<2>| net.loss(x),
                part.optimizer.clone(),
                Mode::data_parallel(world.clone(), Strategy::FullShard),
            )?;
            if start > 0 {
                restore_compiled(&mut step, &Checkpoints::new(folder).open(start)?)?;
            }
            for index in part.steps.clone() {
                losses.push(step.step(part.rate, &batch(index, &Device::flex()))?);
            }
            let taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
            save_taken(folder, world, taken, end)?;
            return Ok(losses);
        }
        let mut net = sharded(&mesh, part.types)?;
        let mut optimizer = ModuleOptimizer::from(part.optimizer.clone());
        match part.call {
            Call::Resume => {
                let resumed = resume(folder, net, optimizer, &mesh)?;
                assert_eq!(resumed.step, start);
                (net, optimizer) = (resumed.model, resumed.optimizer);
            }
            _ if start > 0 => {
                let step = Checkpoints::new(folder).open(start)?;
                (net, optimizer) = restore(net, optimizer, &step)?;
            }
            _ => {}
        }
        for index in part.steps.clone() {
            let loss = net.loss(batch(index, &device()));
            losses.push(number(loss.clone()));
            let gradients = backward(loss, &net)?;
            net = optimizer.step(part.rate, net, gradients);
        }
        match part.call {
            Call::Resume => drop(save(folder, end, &net, &optimizer, &mesh)?),
            _ => save_taken(
                folder,
                world,
                snapshot(&net, &optimizer, mesh.mesh(), "shard")?,
                end,
            )?,
        }
        Ok(losses)
    };
    let losses = launch(LaunchConfig::new(ranks), body);
    losses
        .map(|mut losses| losses.swap_remove(0))
        .map_err(|error| error.to_string())
}

/// The tensors and numbers of a step, apart from their layout.
fn contents(folder: &Path, step: u64) -> (BTreeMap<String, Vec<u8>>, serde_json::Value) {
    let step = Checkpoints::new(folder).open(step).expect("a step");
    let tensors = step.index().tensors.iter().map(|tensor| {
        let bytes = step.read(&tensor.name, &Region::whole(&tensor.shape));
        let name = format!("{} of {:?}", tensor.name, tensor.dtype);
        (name, bytes.expect("readable"))
    });
    (tensors.collect(), step.index().training.optimizer.clone())
}

/// The result of a cell of the table.
#[derive(Debug, Clone, PartialEq)]
enum Cell {
    Bits,
    Refused(String),
    Failed(String),
}

/// A reason without the rank that reported it, and without the first state that it found, because several are
/// possible.
fn plain(reason: &str) -> String {
    if reason.contains(NO_WAY_BACK) {
        return NO_WAY_BACK.to_owned();
    }
    let rest = reason
        .split_once("failed: ")
        .map_or(reason, |(_, rest)| rest);
    rest.to_owned()
}

/// The reason why a part of a run was rejected. Panics do not count.
fn refused(reason: &str) -> Cell {
    if reason.contains("panicked") {
        Cell::Failed(reason.to_owned())
    } else {
        Cell::Refused(plain(reason))
    }
}

fn compared(want: &[f64], got: &[f64]) -> Cell {
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    if bits(want) == bits(got) && want.len() as u64 == STEPS {
        Cell::Bits
    } else {
        Cell::Failed(format!("{want:?} without a stop, and {got:?}"))
    }
}

/// A whole run in parts: each trains some steps on some ranks, in its own folder.
fn parts<O: Optimizer>(of: &Part<O>, cuts: &[u64]) -> Result<Vec<f64>, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut losses = Vec::new();
    let mut start = 0;
    for &end in cuts {
        let part = Part {
            folder: folder.path().into(),
            steps: start..end,
            ..of.clone()
        };
        losses.extend(train(&part)?);
        start = end;
    }
    Ok(losses)
}

/// A run that stops and continues, compared with one that does not stop.
fn stopped<O: Optimizer>(of: &Part<O>) -> Cell {
    match (parts(of, &[STEPS]), parts(of, &[CUT, STEPS])) {
        (Ok(want), Ok(got)) => compared(&want, &got),
        // The first part is rejected for the same reason as the whole: the stop reveals nothing new.
        (Err(reason), Err(other)) if plain(&reason) == plain(&other) => refused(&reason),
        (want, got) => Cell::Failed(format!("{:?}, {:?}", want.err(), got.err())),
    }
}

/// A step that one set of ranks has saved and another saves again: every tensor and number is the same.
fn moved<O: Optimizer>(of: &Part<O>, to: (Call, usize, bool)) -> Cell {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let first = Part {
        folder: folders[0].path().into(),
        steps: 0..CUT,
        ..of.clone()
    };
    if let Err(reason) = train(&first) {
        return refused(&reason);
    }
    let step = format!("step-{CUT:06}");
    let copied = folders[1].path().join(&step);
    std::fs::create_dir(&copied).expect("makes");
    for entry in std::fs::read_dir(folders[0].path().join(&step)).expect("lists") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), copied.join(entry.file_name())).expect("copies");
    }
    let (call, ranks, is_hybrid) = to;
    let second = Part {
        call,
        ranks,
        is_hybrid,
        folder: folders[1].path().into(),
        // Nothing is trained between: the step is saved again under the next number.
        steps: CUT..CUT,
        ..of.clone()
    };
    match again(&second) {
        // The reason for a compiled step, which keeps states of every type, and may step its own whole
        // tensors.
        Err(reason) if reason.contains(NO_WAY_BACK) || reason.contains(WHOLE) => refused(&reason),
        Err(reason) => Cell::Failed(reason),
        Ok(()) => {
            let (before, after) = (
                contents(folders[0].path(), CUT),
                contents(folders[1].path(), CUT + 1),
            );
            let differing = before
                .0
                .iter()
                .find(|(name, bytes)| after.0.get(*name) != Some(*bytes));
            match (
                differing,
                before.0.len() == after.0.len(),
                numbers(&before.1) == numbers(&after.1),
            ) {
                (None, true, true) => Cell::Bits,
                (found, ..) => Cell::Failed(format!(
                    "{:?}: {} and {}",
                    found.map(|(name, _)| name),
                    before.1,
                    after.1
                )),
            }
        }
    }
}

/// The numbers of an optimizer, without the paths of groups, which a compiled step does not know.
fn numbers(kept: &serde_json::Value) -> BTreeMap<String, serde_json::Value> {
    let all = kept.as_object().into_iter().flatten();
    let scalars = all.map(|(path, kept)| (path.clone(), kept["scalars"].clone()));
    scalars
        .filter(|(_, scalars)| scalars.as_object().is_some_and(|all| !all.is_empty()))
        .collect()
}

/// Continues from a step, and saves it again under the next number.
fn again<O: Optimizer>(part: &Part<O>) -> Result<(), String> {
    let part = part.clone();
    let ranks = part.ranks;
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        let mesh = mesh(&world, part.is_hybrid)?;
        let types = part.types;
        let step = Checkpoints::new(&*part.folder).open(CUT)?;
        let taken = match part.call {
            Call::Compiled => {
                let mut compiled: CompiledStep<Tensor<2>> = compile(
                    move |device: &Device| Net::of(device, types),
                    |net: &Net, x: Tensor<2>| net.loss(x),
                    part.optimizer.clone(),
                    Mode::data_parallel(world.clone(), Strategy::FullShard),
                )?;
                restore_compiled(&mut compiled, &step)?;
                // Built at the first batch.
                snapshot_compiled(&mut compiled, mesh.mesh(), "shard")?
            }
            _ => {
                let optimizer = ModuleOptimizer::from(part.optimizer.clone());
                let (net, optimizer) = restore(sharded(&mesh, types)?, optimizer, &step)?;
                snapshot(&net, &optimizer, mesh.mesh(), "shard")?
            }
        };
        save_taken(&part.folder, world, taken, CUT + 1)
    };
    let done = launch(LaunchConfig::new(ranks), body);
    done.map(drop).map_err(|error| error.to_string())
}

/// A run with its optimizer's state in files, which pass through records in the middle, compared with one in
/// memory.
fn in_files<O: Optimizer>(of: &Part<O>) -> Cell {
    let part = of.clone();
    let folder = tempfile::tempdir().expect("a folder");
    let path: Arc<Path> = folder.path().into();
    let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
        let mesh = mesh(&world, false)?;
        let mut net = sharded(&mesh, part.types)?;
        let make = |name: &str| {
            let optimizer = ModuleOptimizer::from(part.optimizer.clone());
            FileBackedOptimizer::new(optimizer, path.join(name), world.rank())
        };
        let mut optimizer = make("first")?;
        let mut losses = Vec::new();
        for index in 0..STEPS {
            if index == CUT {
                let mut next = make("second")?;
                for record in optimizer.records() {
                    let (unit, record) = record?;
                    let bytes = record.into_bytes().expect("a record");
                    next.restore(unit, OptimizerRecord::from_bytes(bytes).expect("a record"))?;
                }
                optimizer = next;
            }
            let loss = net.loss(batch(index, &device()));
            losses.push(number(loss.clone()));
            let gradients = backward(loss, &net)?;
            net = optimizer.step(part.rate, net, gradients)?;
        }
        Ok(losses)
    };
    let got = launch(LaunchConfig::new(of.ranks), body);
    let got = got
        .map(|mut losses| losses.swap_remove(0))
        .map_err(|error| error.to_string());
    match (parts(of, &[STEPS]), got) {
        (Ok(want), Ok(got)) => compared(&want, &got),
        (Err(reason), Err(other)) => match refused(&other) {
            Cell::Refused(_) => refused(&reason),
            other => other,
        },
        (want, got) => Cell::Failed(format!("{:?}, {:?}", want.err(), got.err())),
    }
}

/// Burn's own loop on one rank.
fn plainly<O: Optimizer>(of: &Part<O>) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let mut net = Net::of(&device, of.types);
    let mut optimizer = ModuleOptimizer::from(of.optimizer.clone());
    let steps = (0..STEPS).map(|index| {
        let loss = net.loss(batch(index, &device));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(of.rate, net.clone(), gradients);
        number(loss)
    });
    steps.collect()
}

/// The text of the refusal of a state of a different type.
const NO_WAY_BACK: &str = "the training could not be resumed";

/// The text of the refusal of an optimizer that computes with whole tensors.
const WHOLE: &str = "it computes with whole tensors";

const CELLS: [&str; 12] = [
    "as plain Burn, 1",
    "resume, 2",
    "resume, 3",
    "restore, 2",
    "restore, 2 to 3",
    "restore, 3 to 1",
    "hybrid, 4",
    "files, 1",
    "files, 2",
    "compiled, 2",
    "compiled to eager",
    "eager to compiled",
];

/// The cells of one optimizer and type, by name.
fn cells<O: Optimizer>(optimizer: O, rate: f64, types: [DType; 2]) -> Vec<(&'static str, Cell)> {
    let of = |call, ranks| Part {
        optimizer: optimizer.clone(),
        rate,
        types,
        call,
        ranks,
        is_hybrid: false,
        folder: Path::new("").into(),
        steps: 0..0,
    };
    let plain = match parts(&of(Call::Resume, 1), &[CUT, STEPS]) {
        Ok(got) => compared(&plainly(&of(Call::Resume, 1)), &got),
        Err(reason) => refused(&reason),
    };
    let hybrid = Part {
        is_hybrid: true,
        ..of(Call::Resume, 4)
    };
    let eager = |ranks| of(Call::Snapshot, ranks);
    let compiled = || of(Call::Compiled, 2);
    let outcomes = [
        plain,
        stopped(&of(Call::Resume, 2)),
        stopped(&of(Call::Resume, 3)),
        stopped(&eager(2)),
        moved(&eager(2), (Call::Snapshot, 3, false)),
        moved(&eager(3), (Call::Snapshot, 1, false)),
        stopped(&hybrid),
        in_files(&of(Call::Resume, 1)),
        in_files(&of(Call::Resume, 2)),
        stopped(&compiled()),
        moved(&compiled(), (Call::Snapshot, 3, false)),
        moved(&eager(2), (Call::Compiled, 2, false)),
    ];
    CELLS.into_iter().zip(outcomes).collect()
}

/// The table, and its failures.
#[derive(Default)]
struct Table {
    /// Number of optimizers so far, tried or not.
    num_seen: usize,
    lines: Vec<String>,
    reasons: BTreeMap<String, usize>,
    failures: Vec<String>,
}

impl Table {
    fn add(
        &mut self,
        name: &str,
        types: [DType; 2],
        cells: Vec<(&'static str, Cell)>,
        needs: Needs,
    ) {
        let mut line = format!("{name:34} {:6}", format!("{:?}", types[0]).to_lowercase());
        for (cell, outcome) in cells {
            let what = format!("{name}, {types:?}, {cell}");
            let sign = match outcome {
                Cell::Bits => "0",
                Cell::Refused(reason) => {
                    // Among element-wise optimizers, only a state whose type differs from Burn's is rejected.
                    let is_due = reason.contains(NO_WAY_BACK) && types != [DType::F32; 2];
                    let is_stateless = ["sgd", "sgd decay", "sgd, several"].contains(&name);
                    if needs == Needs::Element && (!is_due || is_stateless) {
                        self.failures.push(format!("{what}: {reason}"));
                    }
                    *self.reasons.entry(reason).or_default() += 1;
                    "r"
                }
                Cell::Failed(reason) => {
                    self.failures.push(format!("{what}: {reason}"));
                    "X"
                }
            };
            line.push_str(&format!(" {sign:>2}"));
        }
        self.lines.push(line);
    }

    fn finish(self) {
        println!("0: to the bit; r: refused; X: wrong. The columns: {CELLS:?}");
        self.lines.iter().for_each(|line| println!("{line}"));
        for (reason, count) in &self.reasons {
            println!("{count} times: {reason}");
        }
        assert!(self.failures.is_empty(), "{:#?}", self.failures);
    }
}

impl ForEach for Table {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, rate: f64, needs: Needs) {
        self.num_seen += 1;
        let is_long = std::env::var_os("BURN_FSDP_LONG").is_some();
        if !is_long && self.num_seen % SHORT != 1 {
            return;
        }
        let types = if is_long {
            &TYPES[..]
        } else {
            &[DType::F32, DType::BF16]
        };
        // The owners hold their tensors whole: tests/owners.rs.
        for dtype in types.iter().copied() {
            let types = [dtype; 2];
            let cells = cells(optimizer.clone(), rate, types);
            self.add(name, types, cells, needs);
        }
    }
}

/// One of this many optimizers is tried, in two types, unless `BURN_FSDP_LONG` is set.
const SHORT: usize = 9;

#[test]
fn every_optimizer_resumes_in_every_type_through_every_call() {
    let mut table = Table::default();
    for_each(&mut table);
    table.finish();
}

/// Vectors of f32 between 16-bit matrices, and vice versa.
#[test]
fn a_module_of_several_types_resumes_in_each_of_them() {
    let mut table = Table::default();
    let mixed = [
        [DType::BF16, DType::F32],
        [DType::F32, DType::F16],
        [DType::F64, DType::BF16],
    ];
    for types in mixed {
        let sgd = SgdConfig::new().build();
        table.add(
            "sgd, several",
            types,
            cells(sgd, 1e-2, types),
            Needs::Element,
        );
        let adamw = AdamWConfig::new().with_epsilon(1e-3).build();
        table.add(
            "adamw, several",
            types,
            cells(adamw, 1e-2, types),
            Needs::Element,
        );
    }
    table.finish();
}

/// Previously a panic revealed this only when the training was resumed.
#[test]
fn a_state_that_cannot_be_restored_is_rejected_before_training() {
    let adamw = || AdamWConfig::new().with_epsilon(1e-3).build();
    let of = |types, call| Part {
        optimizer: adamw(),
        rate: 0.01,
        types,
        call,
        ranks: 2,
        is_hybrid: false,
        folder: Path::new("").into(),
        steps: 0..STEPS,
    };
    let cases = [
        ([DType::BF16; 2], " in BF16"),
        ([DType::F64; 2], " in F64"),
        ([DType::F32, DType::F16], "`scale` in F16"),
    ];
    for (types, words) in cases {
        for call in [Call::Resume, Call::Snapshot] {
            let folder = tempfile::tempdir().expect("a folder");
            let part = Part {
                folder: folder.path().into(),
                ..of(types, call)
            };
            let refused = train(&part).expect_err("it could not come back");
            for word in [
                words,
                "loads it as F32",
                NO_WAY_BACK,
                "ShardPolicy::precision",
            ] {
                assert!(refused.contains(word), "{types:?}, {call:?}: {refused}");
            }
            let mut entries = std::fs::read_dir(folder.path()).expect("lists");
            assert!(entries.next().is_none(), "{types:?}, {call:?}");
        }
    }
    // The first step of an optimizer in files, and not the second.
    let body = |world: ProcessGroup| -> Result<String, Error> {
        let mesh = mesh(&world, false)?;
        let net = sharded(&mesh, [DType::BF16; 2])?;
        let folder = tempfile::tempdir().expect("a folder");
        let optimizer = AdamWConfig::new().init();
        let mut optimizer = FileBackedOptimizer::new(optimizer, folder.path(), world.rank())?;
        let gradients = backward(net.loss(batch(0, &device())), &net)?;
        let refused = optimizer
            .step(1e-2, net, gradients)
            .expect_err("no way back");
        Ok(refused.to_string())
    };
    let refused = launch(LaunchConfig::new(2), body).unwrap_or_else(|error| panic!("{error}"));
    for refused in refused {
        assert!(
            refused.contains(NO_WAY_BACK) && refused.contains("BF16"),
            "{refused}"
        );
    }
}

/// Trains two more steps from the state in a folder; returns the step that it continued from.
fn two_more(folder: &Path) -> Result<u64, String> {
    let folder: Arc<Path> = folder.into();
    let body = move |world: ProcessGroup| -> Result<u64, Error> {
        let mesh = mesh(&world, false)?;
        let optimizer = AdamWConfig::new().init();
        let resumed = resume(&*folder, sharded(&mesh, [DType::F32; 2])?, optimizer, &mesh)?;
        let (mut net, mut optimizer, first) = (resumed.model, resumed.optimizer, resumed.step);
        for index in first..first + 2 {
            let gradients = backward(net.loss(batch(index, &device())), &net)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        save(&*folder, first + 2, &net, &optimizer, &mesh)?;
        Ok(first)
    };
    let steps = launch(LaunchConfig::new(2), body);
    steps
        .map(|steps| steps[0])
        .map_err(|error| error.to_string())
}

#[cfg(unix)]
#[test]
fn resume_uses_the_newest_step_or_reports_why_not() {
    use std::fs;
    use std::os::unix::fs::symlink;

    let fresh = || {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(two_more(folder.path()), Ok(0));
        folder
    };
    type Change = fn(&Path);
    let refused: [(&str, Change, &[&str]); 9] = [
        (
            "moved, with a link in its place",
            |folder| {
                let elsewhere = folder.join("elsewhere");
                fs::rename(folder.join("step-000002"), &elsewhere).expect("moves");
                symlink(elsewhere, folder.join("step-000002")).expect("links");
            },
            &["step-000002", "is a link"],
        ),
        (
            "a newer link to a step",
            |folder| symlink("step-000002", folder.join("step-000009")).expect("links"),
            &["step-000009", "is a link"],
        ),
        (
            "a newer link to nothing",
            |folder| symlink("nowhere", folder.join("step-000009")).expect("links"),
            &["step-000009", "is a link"],
        ),
        (
            "the only one is a link to nothing",
            |folder| {
                fs::remove_dir_all(folder.join("step-000002")).expect("removes");
                symlink("nowhere", folder.join("step-000002")).expect("links");
            },
            &["step-000002", "is a link"],
        ),
        (
            "a newer file",
            |folder| fs::write(folder.join("step-000099"), "no folder").expect("writes"),
            &["step-000099", "is a file"],
        ),
        (
            "the only one is a file",
            |folder| {
                fs::remove_dir_all(folder.join("step-000002")).expect("removes");
                fs::write(folder.join("step-000002"), "no folder").expect("writes");
            },
            &["step-000002", "is a file"],
        ),
        (
            "a newer folder without an index",
            |folder| fs::create_dir(folder.join("step-000003")).expect("makes"),
            &["step-000003"],
        ),
        (
            "without a seal",
            |folder| fs::remove_file(folder.join("step-000002/index.json.crc32")).expect("removes"),
            &["step-000002"],
        ),
        (
            "a file cut short",
            |folder| {
                let step = folder.join("step-000002");
                let mut files = fs::read_dir(step)
                    .expect("lists")
                    .map(|entry| entry.expect("an entry").path());
                let file =
                    files.find(|path| path.extension().is_some_and(|end| end == "safetensors"));
                let file = fs::OpenOptions::new()
                    .write(true)
                    .open(file.expect("a file"))
                    .expect("opens");
                file.set_len(100).expect("cuts");
            },
            &["step-000002"],
        ),
    ];
    for (what, change, words) in refused {
        let folder = fresh();
        change(folder.path());
        let error = two_more(folder.path()).expect_err(what);
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{what}: {error}"
        );
    }
    // An entry without the name of a step is ignored.
    let folder = fresh();
    for name in [
        "step-abc",
        "step-5",
        "step-0000009",
        "step-",
        "notes",
        ".step-000009",
    ] {
        fs::create_dir(folder.path().join(name)).expect("makes");
    }
    symlink("nowhere", folder.path().join("step-10")).expect("links");
    assert_eq!(two_more(folder.path()), Ok(2));
    // A link to the whole folder is the user's own way in.
    let around = tempfile::tempdir().expect("a folder");
    symlink(folder.path(), around.path().join("run")).expect("links");
    assert_eq!(two_more(&around.path().join("run")), Ok(4));
}
