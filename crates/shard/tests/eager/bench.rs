//! The test bench: trains a module sharded over threads, and the same module without sharding.

use std::sync::OnceLock;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, OperationCounts, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, backward_and_step, fully_shard, launch};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// A module under test: its constructor, and its loss on one rank's part of a step's batch.
pub(crate) struct Case<M> {
    pub(crate) build: fn(&Device) -> M,
    /// Rank, step, device.
    pub(crate) loss: fn(&M, usize, usize, &Device) -> Tensor<1>,
}

impl<M> Clone for Case<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Case<M> {}

/// The result of a run.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// Mean over the ranks, by step.
    pub(crate) losses: Vec<f32>,
    /// Whole parameters by path, in module order.
    pub(crate) params: Vec<(String, Vec<f32>)>,
}

pub(crate) const SEED: u64 = 7;

/// The device of modules under test: the CPU, or in a build with its feature the device that
/// `BURN_FSDP_TEST_DEVICE` names.
pub(crate) fn plain_device() -> Device {
    static FOUND: OnceLock<Device> = OnceLock::new();
    let found = FOUND.get_or_init(|| match std::env::var("BURN_FSDP_TEST_DEVICE") {
        Ok(name) => named_device(&name),
        Err(_) => Device::flex(),
    });
    found.clone()
}

/// Returns true if modules under test are on the CPU.
pub(crate) fn is_host() -> bool {
    plain_device() == Device::flex()
}

/// The best device of a backend.
pub(crate) fn named_device(name: &str) -> Device {
    match name {
        "flex" => Device::flex(),
        #[cfg(feature = "ndarray")]
        #[allow(deprecated, reason = "there is no other second backend on the CPU")]
        "ndarray" => Device::ndarray(),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(feature = "vulkan")]
        "vulkan" => Device::vulkan(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(feature = "metal")]
        "metal" => Device::metal(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(feature = "cuda")]
        "cuda" => Device::cuda(0),
        #[cfg(feature = "rocm")]
        "rocm" => Device::rocm(0),
        _ => panic!("BURN_FSDP_TEST_DEVICE is {name}, for which this build has no feature"),
    }
}

pub(crate) fn device() -> Device {
    plain_device().autodiff().gradient_checkpointing()
}

pub(crate) fn optimizer() -> ModuleOptimizer {
    // A large epsilon: with a small one Adam hides a wrong gradient scale.
    AdamWConfig::new()
        .with_epsilon(1e-2)
        .with_weight_decay(0.01)
        .init()
}

/// Trains without sharding on the joined batch of `ranks` ranks.
pub(crate) fn plainly<M: Module + 'static>(case: Case<M>, ranks: usize, steps: usize) -> Outcome {
    plainly_on(&plain_device(), case, ranks, steps)
}

/// Trains without sharding on a device.
pub(crate) fn plainly_on<M: Module + 'static>(
    device: &Device,
    case: Case<M>,
    ranks: usize,
    steps: usize,
) -> Outcome {
    let device = device.clone().autodiff();
    let model = seeded((case.build)(&device), SEED);
    trained_plainly(model, case.loss, &device, [ranks, steps])
}

/// Trains a plain module for `steps` steps on the joined batch of `ranks` ranks.
pub(crate) fn trained_plainly<M: Module>(
    mut model: M,
    loss: fn(&M, usize, usize, &Device) -> Tensor<1>,
    device: &Device,
    [ranks, steps]: [usize; 2],
) -> Outcome {
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let parts = (0..ranks).map(|rank| loss(&model, rank, step, device));
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let loss = sum.div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    Outcome {
        losses,
        params: params(&model),
    }
}

/// Trains sharded over `ranks` threads.
pub(crate) fn sharded<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    steps: usize,
    policy: ShardPolicy,
) -> Outcome {
    joined(&on_ranks(ranks, move |world| {
        trained_by(&world, case, steps, policy.clone())
    }))
}

/// Trains sharded as one of the ranks of a group.
pub(crate) fn trained_by<M: Module + 'static>(
    world: &ProcessGroup,
    case: Case<M>,
    steps: usize,
    policy: ShardPolicy,
) -> Result<Outcome, Error> {
    let device = device();
    let model = build(case, world, &device, policy)?;
    train(model, case, world.rank(), steps, &device)
}

/// Trains a module that is sharded, as one of its ranks.
pub(crate) fn train<M: Module + 'static>(
    mut model: M,
    case: Case<M>,
    rank: usize,
    steps: usize,
    device: &Device,
) -> Result<Outcome, Error> {
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = (case.loss)(&model, rank, step, device);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    let params = whole_params((case.build)(device), &model);
    Ok(Outcome { losses, params })
}

/// The two ways to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    AfterBackward,
    InBackward,
}

impl Way {
    /// Runs backward and a step of `optim`.
    pub(crate) fn step<M: Module + 'static>(
        self,
        loss: Tensor<1>,
        model: M,
        optim: &mut ModuleOptimizer,
    ) -> Result<M, Error> {
        match self {
            Self::InBackward => backward_and_step(loss, model, optim, 1e-2),
            Self::AfterBackward => {
                let gradients = backward(loss, &model)?;
                Ok(optim.step(1e-2, model, gradients))
            }
        }
    }
}

/// Trains a sharded module one way, with any optimizer. Returns the losses and the parameters.
pub(crate) fn train_by<M: Module + 'static>(
    way: Way,
    mut model: M,
    mut optim: ModuleOptimizer,
    steps: usize,
    plain: M,
    loss: impl Fn(&M, usize) -> Tensor<1>,
) -> Result<Outcome, Error> {
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = loss(&model, step);
        losses.push(loss.clone().into_scalar::<f32>());
        model = way.step(loss, model, &mut optim)?;
    }
    let params = whole_params(plain, &model);
    Ok(Outcome { losses, params })
}

/// Asserts that two runs agree in every bit.
pub(crate) fn assert_same(got: &Outcome, want: &Outcome, what: &str) {
    assert_eq!(got.losses, want.losses, "{what}");
    for ((path, got), (_, want)) in got.params.iter().zip(&want.params) {
        let is_same = got
            .iter()
            .map(|x| x.to_bits())
            .eq(want.iter().map(|x| x.to_bits()));
        assert!(is_same, "{what}: {path} differs");
    }
    assert_eq!(got.params.len(), want.params.len());
}

/// Joins the ranks' outcomes: the mean of their losses, and their parameters, which must be the same.
pub(crate) fn joined(outcomes: &[Outcome]) -> Outcome {
    let mut first = outcomes[0].clone();
    for outcome in outcomes {
        let agree = outcome.params == first.params;
        assert!(agree, "ranks agree on every bit of the parameters");
        assert_eq!(outcome.losses.len(), first.losses.len());
    }
    for (step, loss) in first.losses.iter_mut().enumerate() {
        let sum: f32 = outcomes.iter().map(|outcome| outcome.losses[step]).sum();
        *loss = sum / outcomes.len() as f32;
    }
    first
}

/// The parameters after one step of the optimizer with the gradients that `gradients` computes on each
/// rank.
pub(crate) fn stepped<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    policy: ShardPolicy,
    gradients: impl Fn(&M, &ProcessGroup, &Device) -> Result<GradientsParams, Error>
    + Send
    + Sync
    + 'static,
) -> Outcome {
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        // It is created before the module is sharded; elsewhere it is created afterwards.
        let mut optim = optimizer();
        let model = build(case, &world, &device, policy.clone())?;
        let gradients = gradients(&model, &world, &device)?;
        let model = optim.step(1e-2, model, gradients);
        Ok(Outcome {
            losses: Vec::new(),
            params: whole_params((case.build)(&device), &model),
        })
    });
    joined(&outcomes)
}

/// The parameters after one step of the plain module on the joined batch.
pub(crate) fn plainly_stepped<M: Module + 'static>(case: Case<M>, ranks: usize) -> Outcome {
    Outcome {
        losses: Vec::new(),
        ..plainly(case, ranks, 1)
    }
}

/// Returns the module with values of the seed, as lazy as before.
///
/// Burn has one generator for all threads of a process: the numbers that a module draws from it depend on
/// concurrent tests.
pub(crate) fn seeded<M: Module>(module: M, seed: u64) -> M {
    module.map(&mut Seeding {
        seed,
        field: String::new(),
    })
}

/// As [`seeded`], with different values on every rank; rank 0 has the values of [`SEED`], which sharding
/// takes.
pub(crate) fn seeded_by_rank<M: Module>(module: M, rank: usize) -> M {
    seeded(module, SEED + 1000 * rank as u64)
}

struct Seeding {
    /// The seed of the next parameter.
    seed: u64,
    field: String,
}

impl ModuleMapper for Seeding {
    fn enter_module(&mut self, name: &str, _container: &str) {
        name.clone_into(&mut self.field);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let seed = self.seed;
        self.seed += 1;
        // Running states keep their usual initial values.
        if self.field.starts_with("running_") {
            return param;
        }
        let is_scale = self.field == "gamma";
        param.init_mapper(move |old| {
            let shape = old.shape();
            let fan_in = if D == 1 { 10 } else { shape[0] };
            let width = 1.0 / (fan_in as f64).sqrt();
            let values = Distribution::Uniform(-width, width);
            let data =
                TensorData::random::<f32, _, _>(shape, values, &mut StdRng::seed_from_u64(seed));
            let values = Tensor::from_data(data, &old.device());
            if is_scale { values + 1.0 } else { values }
        })
    }
}

/// Returns a module whose values are initialized.
pub(crate) fn ready<M: Module>(build: impl FnOnce() -> M) -> M {
    let module = build();
    params(&module);
    module
}

/// The sharded module, with the values of [`plainly`] on rank 0.
pub(crate) fn build<M: Module + 'static>(
    case: Case<M>,
    world: &ProcessGroup,
    device: &Device,
    policy: ShardPolicy,
) -> Result<M, Error> {
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = seeded_by_rank((case.build)(device), world.rank());
    fully_shard(model, &mesh, policy)
}

/// Runs `body` on `ranks` threads.
pub(crate) fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let deadline = std::time::Duration::from_secs(60);
    launch(LaunchConfig::new(ranks).deadline(deadline), body)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the message with which `body` panics. An error of a rank is a panic outside of [`on_ranks`].
pub(crate) fn panic_of<T>(body: impl FnOnce() -> T) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    let message = panic.err().expect("refused").downcast::<String>();
    *message.expect("a text")
}

/// The whole parameters of a sharded module, through a record into `plain`. Collective.
pub(crate) fn whole_params<M: Module>(plain: M, model: &M) -> Vec<(String, Vec<f32>)> {
    params(&plain.load_record(model.clone().into_record()))
}

/// The parameters of a plain module by path.
pub(crate) fn params<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut reader = Reader::default();
    model.visit(&mut reader);
    // Running states are not parameters: they stay local to their rank.
    reader.found.retain(|(path, _)| !path.contains(".running_"));
    reader.found
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().convert::<f32>();
        let values = values.try_to_vec().expect("converted to f32");
        self.found.push((self.path.join("."), values));
    }
}

/// Asserts that two runs agree to `tolerance`, relative to the largest value of each parameter.
pub(crate) fn assert_close(got: &Outcome, want: &Outcome, tolerance: f32) {
    for (step, (got, want)) in got.losses.iter().zip(&want.losses).enumerate() {
        let difference = (got - want).abs() / want.abs().max(1e-6);
        assert!(
            difference <= tolerance,
            "step {step}: loss {got}, expected {want}"
        );
    }
    assert_eq!(got.losses.len(), want.losses.len());
    assert_eq!(got.params.len(), want.params.len());
    for ((path, got), (want_path, want)) in got.params.iter().zip(&want.params) {
        assert_eq!(path, want_path);
        assert_eq!(got.len(), want.len(), "{path}");
        let scale = want.iter().fold(1e-6f32, |max, value| max.max(value.abs()));
        for (got, want) in got.iter().zip(want) {
            let difference = (got - want).abs() / scale;
            assert!(difference <= tolerance, "{path}: {got}, expected {want}");
        }
    }
}

/// Operations of one kind since `before`.
pub(crate) fn since(world: &ProcessGroup, before: &OperationCounts) -> OperationCounts {
    world.counts().since(before)
}
