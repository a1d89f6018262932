//! Bits that flip in the data that ranks hold and exchange, in both engines. Each flip is named by step, operation and
//! rank, and without a flip nothing is reported.
//!
//! Short by default, 1,000 flips and 10,000 steps with `BURN_FSDP_LONG=1`. `BURN_FSDP_CASES=300` sets the number of
//! flips, `BURN_FSDP_SEED=7` chooses others.

use std::time::Duration;

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, activation};
use burn_fsdp::compile::{Mode, Options, compile};
use burn_fsdp::internals::collectives::Fingerprint;
use burn_fsdp::internals::optim::SealedOptimizer;
use burn_fsdp::internals::state::full_state;
use burn_fsdp::internals::testing::{At, Fault, How};
use burn_fsdp::state::{BufferSync, moving_average, sync_buffers};
use burn_fsdp::{
    Check, Clip, Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy,
    backward, catch, clip_grad_norm, fully_shard, launch, no_sync, resume, save,
};

/// Steps of a training run in which a bit flips.
const STEPS: u64 = 4;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    norms: Vec<BatchNorm>,
    out: Linear,
}

impl Net {
    fn init(device: &Device) -> Self {
        let layer = |(from, to)| LinearConfig::new(from, to).init(device);
        Self {
            layers: [(5, 9), (9, 7), (7, 6), (6, 8)].map(layer).into(),
            norms: [9, 7, 6, 8]
                .map(|width| BatchNormConfig::new(width).init(device))
                .into(),
            out: layer((8, 3)),
        }
    }

    fn loss(&self, (x, target): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let layers = self.layers.iter().zip(&self.norms);
        let x = layers.fold(x, |x, (layer, norm)| {
            let [rows, _] = x.dims();
            let x = layer.forward(x);
            let width = x.dims()[1];
            let x = norm.forward(x.reshape([rows, width, 1]));
            activation::gelu(x.reshape([rows, width]))
        });
        MseLoss::new().forward(self.out.forward(x), target, Reduction::Mean)
    }
}

fn batch(step: u64, rank: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let values = |len: usize, factor: f32| {
        let at = |i: usize| ((i + 1) as f32 * factor + (step % 97) as f32 + rank as f32).sin();
        (0..len).map(at).collect::<Vec<_>>()
    };
    let of = |len, factor| Tensor::<1>::from_floats(values(len, factor).as_slice(), device);
    (of(30, 1.7).reshape([6, 5]), of(18, 0.9).reshape([6, 3]))
}

/// The settings of a training run.
#[derive(Debug, Clone, Copy)]
struct Training {
    is_compiled: bool,
    num_ranks: usize,
    strategy: Strategy,
    /// Ranks along an axis of replicas.
    num_replicas: usize,
    clips: bool,
    accumulates: bool,
    /// True if it evaluates, averages, saves and resumes in between.
    wanders: bool,
    steps: u64,
}

impl Training {
    fn mesh(&self, world: &ProcessGroup) -> Result<ProcessMesh, Error> {
        let shards = self.num_ranks / self.num_replicas;
        let mesh = match self.num_replicas {
            1 => Mesh::line("shard", shards)?,
            replicas => Mesh::new([("replicate", replicas), ("shard", shards)])?,
        };
        Ok(ProcessMesh::new(world, mesh)?)
    }

    /// Trains on one rank until the end or the first error.
    fn run(&self, world: &ProcessGroup) -> Result<(), String> {
        if self.is_compiled {
            self.compiled(world)
        } else {
            self.eager(world).map_err(|error| error.to_string())
        }
    }

    fn eager(&self, world: &ProcessGroup) -> Result<(), Error> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = self.mesh(world)?;
        let policy = ShardPolicy::new()
            .units(["layers.*", "norms.*"])
            .strategy(self.strategy)
            .whole_below(4);
        let policy = match self.num_replicas {
            1 => policy,
            _ => policy.replicate_axis("replicate"),
        };
        let mut model = fully_shard(Net::init(&device), &mesh, policy)?;
        let fresh =
            || -> ModuleOptimizer { SealedOptimizer::new(AdamWConfig::new().build()).into() };
        let mut optimizer = fresh();
        let mut average = model.clone();
        let folder = self.folder(world)?;
        for step in 0..self.steps {
            world.begin_step(step);
            let mut gradients = self.gradients(world, &model, step, &device)?;
            if self.clips {
                let clip = Clip::to(0.01);
                gradients = clip_grad_norm(&model, gradients, clip)?.gradients;
            }
            model = catch(|| optimizer.step(1e-2, model, gradients))?;
            if !self.wanders {
                continue;
            }
            if step % 5 == 1 {
                let valid = model.valid();
                let inputs = batch(step, 9, &device.clone().without_autodiff());
                catch(|| valid.loss(inputs).into_scalar::<f32>())?;
                average = moving_average(average, &model, 0.9)?;
            }
            if step % 7 == 2 {
                model = sync_buffers(model, BufferSync::Average)?;
                full_state(&model, |_| ())?;
            }
            if step % 50 == 33 {
                save(&folder, step, &model, &optimizer, &mesh)?;
            }
            if step % 50 == 41 {
                let resumed = resume(&folder, model, fresh(), &mesh)?;
                (model, optimizer) = (resumed.model, resumed.optimizer);
            }
        }
        drop(average);
        if world.rank() == 0 && self.wanders {
            std::fs::remove_dir_all(&folder).expect("a folder that is there");
        }
        world.barrier("end")?;
        Ok(())
    }

    /// Returns a folder that all ranks know.
    fn folder(&self, world: &ProcessGroup) -> Result<std::path::PathBuf, Error> {
        let own = if world.rank() == 0 && self.wanders {
            tempfile::tempdir().expect("a folder").keep()
        } else {
            std::path::PathBuf::new()
        };
        let own = own.into_os_string().into_encoded_bytes();
        let told = world.exchange("folder", own)?;
        let first = String::from_utf8(told[0].clone()).expect("a name in UTF-8");
        Ok(first.into())
    }

    fn gradients(
        &self,
        world: &ProcessGroup,
        model: &Net,
        step: u64,
        device: &Device,
    ) -> Result<GradientsParams, Error> {
        let micro = |number: u64| -> Result<GradientsParams, Error> {
            let inputs = batch(2 * step + number, world.rank(), device);
            let loss = catch(|| model.loss(inputs))?;
            Ok(backward(loss, model)?)
        };
        if self.accumulates {
            no_sync(model, || micro(1))??;
        }
        micro(0)
    }

    fn compiled(&self, world: &ProcessGroup) -> Result<(), String> {
        let text = |error: burn_fsdp::internals::compile::Error| error.to_string();
        let mode = match self.num_replicas {
            1 => Mode::data_parallel(world.clone(), self.strategy),
            _ => {
                let mesh = self.mesh(world).map_err(|error| error.to_string())?;
                Mode::hybrid(mesh, "replicate", self.strategy).map_err(text)?
            }
        };
        let clip = self.clips.then(|| Clip::to(0.01));
        let mode = mode.options(Options::default().clip_grad_norm(clip));
        let optimizer = AdamWConfig::new().build();
        let mut step = compile(Net::init, Net::loss, optimizer, mode).map_err(text)?;
        let device = Device::flex();
        for number in 0..self.steps {
            world.begin_step(number);
            let own = |micro: u64| batch(2 * number + micro, world.rank(), &device);
            if self.accumulates {
                step.step_accumulated(1e-2, &[own(0), own(1)])
            } else {
                step.step(1e-2, &own(0))
            }
            .map_err(text)?;
            if self.wanders && number % 7 == 2 {
                let whole = step.parameter("out.weight").map_err(text)?;
                step.set_parameter("out.weight", whole).map_err(text)?;
                let shard = step.shard("layers.0.weight").map_err(text)?;
                step.set_shard("layers.0.weight", shard).map_err(text)?;
            }
        }
        world.barrier("end").map_err(|error| error.to_string())
    }

    /// Trains on all ranks; returns each rank's final result.
    fn train(self, fault: Option<Fault>) -> Vec<Result<(), String>> {
        let config = LaunchConfig::new(self.num_ranks)
            .deadline(Duration::from_secs(120))
            .check(Check::Agreement);
        let body = move |world: ProcessGroup| {
            if let Some(fault) = fault {
                world.set_fault(fault);
            }
            Device::flex().seed(3);
            Ok::<_, Error>(self.run(&world))
        };
        launch(config, body).unwrap_or_else(|error| panic!("{self:?}, {fault:?}: {error}"))
    }
}

/// Numbers drawn by a seed.
struct Draw {
    seed: u64,
    count: u64,
}

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.count += 1;
        Fingerprint::of(&(self.seed, self.count)) % end
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// A training and the bit that flips in it.
#[derive(Debug)]
struct Flip {
    training: Training,
    fault: Fault,
}

impl Flip {
    fn random(draw: &mut Draw) -> Self {
        loop {
            let num_ranks = draw.of(&[1, 2, 3, 4]);
            let strategies = [
                Strategy::FullShard,
                Strategy::ShardGradOp,
                Strategy::NoShard,
            ];
            let strategy = draw.of(&strategies);
            let is_hybrid = num_ranks == 4 && strategy != Strategy::NoShard;
            let training = Training {
                is_compiled: draw.of(&[false, true]),
                num_ranks,
                strategy,
                num_replicas: if is_hybrid { draw.of(&[1, 2]) } else { 1 },
                clips: draw.of(&[false, true]),
                accumulates: draw.of(&[false, true]),
                wanders: false,
                steps: STEPS,
            };
            let places = [
                At::Collective,
                At::Shard,
                At::Weight,
                At::Gradient,
                At::State,
                At::Running,
            ];
            let rank = draw.below(num_ranks as u64) as usize;
            let step = 1 + draw.below(STEPS - 2);
            let fault = Fault::new(rank, step, draw.of(&places), How::Flip);
            let flip = Self {
                training,
                fault: fault.seed(draw.below(1 << 40)),
            };
            if flip.is_possible() {
                return flip;
            }
        }
    }

    /// Returns true if such a training run has such a value.
    fn is_possible(&self) -> bool {
        let Training {
            is_compiled,
            num_ranks,
            strategy,
            ..
        } = self.training;
        let is_alone = num_ranks == 1;
        match self.fault.at {
            At::Collective => !is_alone,
            At::Weight => !is_alone && strategy != Strategy::NoShard,
            At::Gradient => !(is_alone && is_compiled),
            _ => true,
        }
    }

    /// The words by which an error names the value.
    fn words(&self) -> &'static [&'static str] {
        match (self.fault.at, self.training.is_compiled) {
            (At::Collective, _) => &["received different bytes"],
            (At::Shard, false) => &["the shard of `", "the parameter of `"],
            (At::Shard, true) => &["parameter "],
            (At::Weight, false) => &["the full parameter of `"],
            (At::Weight, true) => &["the gathered "],
            (At::Gradient, false) => &["the reduced gradient of `"],
            (At::Gradient, true) => &["the reduced "],
            (At::State, false) => &["the optimizer's state `"],
            (At::State, true) => &["state "],
            (At::Running, false) => &["the running state `"],
            _ => &["buffer "],
        }
    }

    /// Returns the problem with the ranks' results, if there is one.
    fn problem(&self) -> Option<String> {
        let Fault { rank, step, at, .. } = self.fault;
        let by_rank = match at {
            At::Collective => format!("than rank {rank} passed to the call"),
            _ => format!("rank {rank} found that the bytes of "),
        };
        let says = self.training.train(Some(self.fault));
        let problem = says.into_iter().enumerate().find_map(|(own, said)| {
            let Err(text) = said else {
                return Some(format!("rank {own} noticed nothing"));
            };
            let is_named = self.words().iter().any(|word| text.contains(word));
            let is_whole = text.contains(&format!("in step {step}"))
                && text.contains(&by_rank)
                && text.contains(" of group ")
                && is_named;
            (!is_whole).then(|| format!("rank {own} says: {text}"))
        })?;
        Some(format!("{self:?}: {problem}"))
    }
}

/// Returns a number that the user of the test may set.
fn chosen(name: &str, default: u64) -> u64 {
    let number = std::env::var(name).ok().and_then(|text| text.parse().ok());
    number.unwrap_or(default)
}

fn is_long() -> bool {
    std::env::var_os("BURN_FSDP_LONG").is_some()
}

#[test]
fn each_bit_that_flips_is_named_by_step_operation_and_rank() {
    let num_flips = chosen("BURN_FSDP_CASES", if is_long() { 1_000 } else { 60 });
    let seed = chosen("BURN_FSDP_SEED", 0);
    let mut draw = Draw { seed, count: 0 };
    let mut problems = Vec::new();
    let mut by_place = std::collections::BTreeMap::new();
    for _ in 0..num_flips {
        let flip = Flip::random(&mut draw);
        *by_place.entry(flip.fault.at.to_string()).or_insert(0) += 1;
        problems.extend(flip.problem());
    }
    println!("{num_flips} flips: {by_place:?}");
    assert!(
        problems.is_empty(),
        "{} of {num_flips} flips: {}",
        problems.len(),
        problems.join("\n")
    );
}

#[test]
fn nothing_is_found_where_nothing_flips() {
    let steps = if is_long() { 10_000 } else { 160 };
    let mut trainings = Vec::new();
    for is_compiled in [false, true] {
        for (num_ranks, strategy, num_replicas) in [
            (1, Strategy::FullShard, 1),
            (2, Strategy::FullShard, 1),
            (2, Strategy::NoShard, 1),
            (3, Strategy::ShardGradOp, 1),
            (4, Strategy::FullShard, 2),
        ] {
            for both in [false, true] {
                trainings.push(Training {
                    is_compiled,
                    num_ranks,
                    strategy,
                    num_replicas,
                    clips: both,
                    accumulates: both,
                    wanders: true,
                    steps: 0,
                });
            }
        }
    }
    let each = steps / trainings.len() as u64;
    for training in trainings {
        let training = Training {
            steps: each,
            ..training
        };
        for said in training.train(None) {
            said.unwrap_or_else(|text| panic!("{training:?}: {text}"));
        }
    }
}

/// A single rank exchanges nothing with others, and an evaluation updates nothing: the shard is checked where it is
/// used.
#[test]
fn a_shard_that_flips_in_an_evaluation_is_named_on_any_number_of_ranks() {
    for num_ranks in 1..=3 {
        let last = num_ranks - 1;
        let body = move |world: ProcessGroup| {
            world.set_fault(Fault::new(last, 1, At::Shard, How::Flip));
            let device = Device::flex().autodiff();
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", num_ranks)?)?;
            let policy = ShardPolicy::new().units(["layers.*", "norms.*"]);
            let model = fully_shard(Net::init(&device), &mesh, policy)?.valid();
            let loss = |step| {
                world.begin_step(step);
                let inputs = batch(step, world.rank(), &device.clone().without_autodiff());
                let loss = catch(|| model.loss(inputs).into_scalar::<f32>());
                loss.map_err(|error| error.to_string())
            };
            Ok::<_, Error>((loss(0), loss(1)))
        };
        let config = LaunchConfig::new(num_ranks).check(Check::Agreement);
        for (before, after) in launch(config, body).expect("ranks that return") {
            before.expect("no flip yet");
            let text = after.expect_err("a flip");
            let names = format!("rank {last} found that the bytes of the shard of `");
            assert!(text.contains(&names), "{num_ranks} ranks: {text}");
        }
    }
}
