//! Models with an untrained part: fine-tuning, adapters, adversaries, idle and frozen statistics.

use std::ops::Range;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::softplus;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, launch};
use burn_fsdp_mesh::Cut;
use burn_fsdp_spmd::{Error, LazyLora, Mode, Strategy, compile};

use crate::agreement::{ROWS, agrees, data, vectors};
use crate::compiled::seeded;
use crate::eager::{adamw, floats};

#[derive(Module, Debug)]
pub(crate) struct Two {
    pub(crate) a: Linear,
    pub(crate) b: Linear,
}

impl Two {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            a: LinearConfig::new(5, 4).init(device),
            b: LinearConfig::new(4, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.b.forward(self.a.forward(x).tanh());
        y.sub_scalar(0.5).square().mean()
    }
}

fn first_frozen(device: &Device) -> Two {
    let two = Two::new(device);
    Two {
        a: two.a.no_grad(),
        ..two
    }
}

fn last_frozen(device: &Device) -> Two {
    let two = Two::new(device);
    Two {
        b: two.b.no_grad(),
        ..two
    }
}

#[test]
fn frozen_layers_stay_and_the_others_are_trained() {
    let _guard = seeded();
    agrees("the first layer", first_frozen, Two::loss, vectors);
    agrees("the last layer", last_frozen, Two::loss, vectors);
    let bias = |device: &Device| {
        let mut two = Two::new(device);
        two.a.bias = two.a.bias.map(|bias| bias.set_require_grad(false));
        two
    };
    agrees("a bias", bias, Two::loss, vectors);
    let by_hand = |model: &Two, x: Tensor<2>| {
        let y = model.a.forward(x).tanh().matmul(model.b.weight.val());
        y.sub_scalar(0.5).square().mean()
    };
    agrees("a weight read by hand", last_frozen, by_hand, vectors);
}

#[derive(Module, Debug)]
struct Normed {
    a: Linear,
    norm: LayerNorm,
    b: Linear,
}

#[derive(Module, Debug)]
struct Words {
    embed: Embedding,
    head: Linear,
}

impl Words {
    fn loss(&self, words: Tensor<2, Int>) -> Tensor<1> {
        let y = self.head.forward(self.embed.forward(words));
        y.sub_scalar(0.5).square().mean()
    }
}

fn words(step: usize, rows: Range<usize>, device: &Device) -> Tensor<2, Int> {
    let all: Vec<i64> = (0..ROWS * 4).map(|i| ((i * 5 + step) % 7) as i64).collect();
    Tensor::from_data(TensorData::new(all, [ROWS, 4]), device).slice([rows])
}

#[test]
fn frozen_norms_and_embeddings_stay() {
    let _guard = seeded();
    let norm = |device: &Device| Normed {
        a: LinearConfig::new(5, 4).init(device),
        norm: LayerNormConfig::new(4).init(device).no_grad(),
        b: LinearConfig::new(4, 3).init(device),
    };
    let loss = |model: &Normed, x: Tensor<2>| {
        let y = model.norm.forward(model.a.forward(x)).tanh();
        model.b.forward(y).sub_scalar(0.5).square().mean()
    };
    agrees("a norm", norm, loss, vectors);
    let embedding = |device: &Device| Words {
        embed: EmbeddingConfig::new(7, 5).init(device).no_grad(),
        head: LinearConfig::new(5, 3).init(device),
    };
    agrees("an embedding", embedding, Words::loss, words);
    let head = |device: &Device| Words {
        embed: EmbeddingConfig::new(7, 5).init(device),
        head: LinearConfig::new(5, 3).init(device).no_grad(),
    };
    agrees("a head", head, Words::loss, words);
}

#[derive(Module, Debug)]
struct Gained {
    linear: Linear,
    gain: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct Deep {
    blocks: Vec<Gained>,
}

impl Deep {
    fn new(device: &Device) -> Self {
        let block = |_| Gained {
            linear: LinearConfig::new(5, 5).init(device),
            gain: Param::from_tensor(data(1, [5], device)),
        };
        Self {
            blocks: (0..5).map(block).collect(),
        }
    }

    /// Every weight is changed before its use, as the gain of Gemma's norm is.
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let block = |x: Tensor<2>, block: &Gained| {
            let weight = block.linear.weight.val() * 2.0;
            let gain = (block.gain.val() + 1.0).unsqueeze();
            (x.matmul(weight) * gain).tanh()
        };
        let y = self.blocks.iter().fold(x, block);
        y.sub_scalar(0.5).square().mean()
    }

    fn frozen(mut self, is_frozen: impl Fn(usize, &str) -> bool) -> Self {
        for (index, block) in self.blocks.iter_mut().enumerate() {
            let is_trained = |name| !is_frozen(index, name);
            let weight = block.linear.weight.clone();
            block.linear.weight = weight.set_require_grad(is_trained("weight"));
            block.gain = block.gain.clone().set_require_grad(is_trained("gain"));
        }
        self
    }
}

#[test]
fn changed_copies_of_frozen_weights_do_not_keep_them() {
    let _guard = seeded();
    agrees("no weight", Deep::new, Deep::loss, vectors);
    let gains = |device: &Device| Deep::new(device).frozen(|_, name| name == "gain");
    agrees("gains", gains, Deep::loss, vectors);
    let weights = |device: &Device| Deep::new(device).frozen(|_, name| name == "weight");
    agrees("weights", weights, Deep::loss, vectors);
    let most = |device: &Device| Deep::new(device).frozen(|index, _| index != 0);
    agrees("all blocks but the first", most, Deep::loss, vectors);
}

/// A visitor that initializes lazy parameters in module order.
pub(crate) struct Initialized;

impl ModuleVisitor for Initialized {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

#[test]
fn adapters_train_while_their_base_is_frozen() {
    let _guard = seeded();
    let init = |device: &Device| {
        let two = Two::new(device);
        Two {
            a: two.a.apply_lora(Lora::new(2, 4.0)),
            ..two
        }
    };
    agrees("one layer with an adapter", init, Two::loss, vectors);
    let all = |device: &Device| Two::new(device).apply_lora(Lora::new(2, 4.0));
    agrees("adapters everywhere", all, Two::loss, vectors);
    let lazily = |device: &Device| {
        let of_a = Lora::new(3, 1.5).set_param_group(ParamGroup::from_predicate("a.weight"));
        let groups = LazyLora::new(Lora::new(2, 4.0)).and(of_a);
        let two = Two::new(device);
        // Otherwise Burn draws the weights and the factors in the order of their first use.
        two.visit(&mut Initialized);
        let two = two.apply_reparameterization(groups);
        let factors = |layer: &Linear| layer.weight.adapter().expect("an adapter").clone();
        let (a, b) = (factors(&two.a), factors(&two.b));
        assert_eq!((a.a.lazy_shape()[1], a.scale), (3, 0.5));
        assert_eq!((b.a.lazy_shape()[1], b.scale), (2, 2.0));
        two
    };
    agrees("two groups of adapters", lazily, Two::loss, vectors);
}

#[test]
fn a_frozen_copy_is_a_teacher() {
    let _guard = seeded();
    let init = |device: &Device| {
        let student = LinearConfig::new(5, 3).init(device);
        // Burn's lazy parameters share the flag for training with their copies; values do not.
        let _ = (
            student.weight.val(),
            student.bias.as_ref().map(|bias| bias.val()),
        );
        Two {
            b: student.clone().no_grad(),
            a: student,
        }
    };
    let loss = |model: &Two, x: Tensor<2>| {
        let wanted = model.b.forward(x.clone());
        let got = model.a.forward(x.mul_scalar(0.5));
        (got - wanted).square().mean()
    };
    agrees("a teacher", init, loss, vectors);
    let detached = |model: &Two, x: Tensor<2>| {
        let wanted = model.b.forward(x.clone()).detach();
        (model.a.forward(x) - wanted).square().mean()
    };
    let both = |device: &Device| Two {
        a: LinearConfig::new(5, 3).init(device),
        b: LinearConfig::new(5, 3).init(device),
    };
    agrees("a detached teacher", both, detached, vectors);
}

#[test]
fn frozen_parameters_are_sharded_and_gathered_but_not_reduced() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).verified();
        let mut step = compile(first_frozen, Two::loss, adamw().build(), mode)?;
        // Before there is a graph, and after.
        let before = step.layout("a.weight")?;
        let batch = vectors(0, 0..3, &device);
        step.step(1e-2, &batch)?;
        let counts = world.counts();
        step.step(1e-2, &batch)?;
        let after = world.counts();
        assert_eq!(step.layout("a.weight")?, before);
        assert!(
            !before.is_whole() && before.cut == Cut::Elements,
            "{before:?}"
        );
        let kinds = [
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::AllReduce,
            OperationKind::Exchange,
        ];
        Ok(kinds.map(|kind| after.of(kind).operations - counts.of(kind).operations))
    };
    for counts in launch(LaunchConfig::new(2), body).unwrap() {
        // Two units, one of them trained; the loss; and the agreement on the graph.
        assert_eq!(counts, [2, 1, 1, 1]);
    }
}

#[derive(Module, Debug)]
struct Gan {
    generator: Linear,
    critic: Two,
}

impl Gan {
    fn new(device: &Device) -> Self {
        Self {
            generator: LinearConfig::new(2, 5).init(device),
            critic: Two::new(device),
        }
    }

    fn score(&self, x: Tensor<2>) -> Tensor<2> {
        self.critic.b.forward(self.critic.a.forward(x).tanh())
    }

    fn critic_loss(&self, (real, noise): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let made = self.generator.forward(noise).detach();
        softplus(self.score(real).neg(), 1.0).mean() + softplus(self.score(made), 1.0).mean()
    }

    fn generator_loss(&self, noise: Tensor<2>) -> Tensor<1> {
        softplus(self.score(self.generator.forward(noise)).neg(), 1.0).mean()
    }
}

fn noise(step: usize, rows: Range<usize>, device: &Device) -> Tensor<2> {
    data(step + 50, [ROWS, 2], device).slice([rows])
}

/// Returns the losses of both, step by step, in Burn's training.
fn adversaries() -> Vec<[f64; 2]> {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Gan::new(&device);
    let _ = floats(&model);
    let (mut critic, mut generator) = (adamw().init(), adamw().init());
    let mut losses = Vec::new();
    for step in 0..5 {
        let z = noise(step, 0..ROWS, &device);
        let loss = model.critic_loss((vectors(step, 0..ROWS, &device), z.clone()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model.critic);
        model.critic = critic.step(1e-2, model.critic, gradients);
        let other = model.generator_loss(z);
        let gradients = GradientsParams::from_grads(other.backward(), &model.generator);
        model.generator = generator.step(1e-2, model.generator, gradients);
        let numbers = [loss, other].map(|loss| f64::from(loss.into_scalar::<f32>()));
        losses.push(numbers);
    }
    losses
}

#[test]
fn two_models_are_trained_against_each_other() {
    let _guard = seeded();
    let expected = adversaries();
    let body = |world: ProcessGroup| -> Result<Vec<[f64; 2]>, Error> {
        let device = Device::flex();
        let mode = || Mode::data_parallel(world.clone(), Strategy::FullShard).verified();
        let seed = || {
            if world.rank() == 0 {
                device.seed(1);
            }
        };
        seed();
        let init = |device: &Device| {
            let gan = Gan::new(device);
            Gan {
                generator: gan.generator.no_grad(),
                ..gan
            }
        };
        let mut critic = compile(init, Gan::critic_loss, adamw().build(), mode())?;
        seed();
        let init = |device: &Device| {
            let gan = Gan::new(device);
            Gan {
                critic: gan.critic.no_grad(),
                ..gan
            }
        };
        let mut generator = compile(init, Gan::generator_loss, adamw().build(), mode())?;
        let paths: Vec<_> = critic
            .parameters()
            .iter()
            .map(|spec| spec.path.clone())
            .collect();
        let each = ROWS / world.size();
        let own = world.rank() * each..(world.rank() + 1) * each;
        let mut losses = Vec::new();
        for step in 0..5 {
            let z = noise(step, own.clone(), &device);
            let batch = (vectors(step, own.clone(), &device), z.clone());
            let first = critic.step(1e-2, &batch)?;
            for path in paths.iter().filter(|path| path.starts_with("critic")) {
                generator.set_shard(path, critic.shard(path)?)?;
            }
            let second = generator.step(1e-2, &z)?;
            for path in paths.iter().filter(|path| path.starts_with("generator")) {
                critic.set_shard(path, generator.shard(path)?)?;
            }
            losses.push([first, second]);
        }
        Ok(losses)
    };
    for num_ranks in 1..=3 {
        for losses in launch(LaunchConfig::new(num_ranks), body).unwrap() {
            for (step, (got, expected)) in losses.iter().zip(&expected).enumerate() {
                for (got, expected) in got.iter().zip(expected) {
                    let allowed = if num_ranks == 1 { 0.0 } else { 1e-5 };
                    assert!(
                        (got - expected).abs() <= allowed,
                        "{num_ranks} ranks, step {step}: {got} is not {expected}"
                    );
                }
            }
        }
    }
}

#[derive(Module, Debug)]
struct Statistics {
    layer: Linear,
    norm: BatchNorm,
}

impl Statistics {
    fn new(device: &Device) -> Self {
        Self {
            layer: LinearConfig::new(5, 4).init(device),
            norm: BatchNormConfig::new(4).init(device),
        }
    }
}

#[test]
fn fixed_and_frozen_statistics_do_not_change() {
    let _guard = seeded();
    let idle = |model: &Statistics, x: Tensor<2>| model.layer.forward(x).square().mean();
    agrees("an idle norm", Statistics::new, idle, vectors);
    let frozen = |device: &Device| {
        let model = Statistics::new(device);
        Statistics {
            norm: model.norm.freeze(),
            ..model
        }
    };
    let loss = |model: &Statistics, x: Tensor<2>| {
        let y = model.norm.forward(model.layer.forward(x));
        y.sub_scalar(0.3).square().mean()
    };
    agrees("a frozen norm", frozen, loss, vectors);
}

#[test]
fn statistics_that_run_twice_are_refused_by_name() {
    let _guard = seeded();
    let device = Device::flex();
    let loss = |model: &Statistics, x: Tensor<2>| {
        let run = |x: Tensor<2>| model.norm.forward(model.layer.forward(x));
        (run(x.clone()) - run(x.tanh())).square().mean()
    };
    let optimizer = SgdConfig::new().build();
    let mut step = compile(Statistics::new, loss, optimizer, Mode::single()).unwrap();
    let error = step.step(1e-1, &vectors(0, 0..ROWS, &device)).unwrap_err();
    let is_named = matches!(&error, Error::StatisticsTwice { path } if path == "norm");
    assert!(is_named, "{error}");
    assert!(error.to_string().contains("Tensor::cat"), "{error}");
    // The solution: both halves in one run.
    let joined = |model: &Statistics, x: Tensor<2>| {
        let [rows, _] = x.dims();
        let both = Tensor::cat(vec![x.clone(), x.tanh()], 0);
        let both = model.norm.forward(model.layer.forward(both));
        let [a, b] = [0, rows].map(|start| both.clone().narrow(0, start, rows));
        (a - b).square().mean()
    };
    let optimizer = SgdConfig::new().build();
    let mut step = compile(Statistics::new, joined, optimizer, Mode::single()).unwrap();
    step.step(1e-1, &vectors(0, 0..ROWS, &device)).unwrap();
}
