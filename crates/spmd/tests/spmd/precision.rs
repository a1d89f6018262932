//! Mixed precision, compared with Burn's loop on one rank that casts a copy of the model.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_spmd::Precision;
use burn_fsdp_spmd::graph::CollectiveKind;
use burn_fsdp_spmd::passes::Bucket;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{DataParallel, Error, Mode, Strategy, compile};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager::floats;
use crate::models::{TokenBatch, VOCAB, tokens};

const STEPS: usize = 6;
pub(crate) const ROWS: usize = 12;
const DIM: usize = 10;

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

/// A residual network whose norms compute in 32 bits, as its author wrote it.
#[derive(Module, Debug)]
pub(crate) struct Net {
    embed: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        let block = || Block {
            norm: LayerNormConfig::new(DIM).init(device),
            up: LinearConfig::new(DIM, 3 * DIM).init(device),
            down: LinearConfig::new(3 * DIM, DIM).init(device),
        };
        Self {
            embed: EmbeddingConfig::new(VOCAB, DIM).init(device),
            blocks: (0..3).map(|_| block()).collect(),
            head: LinearConfig::new(DIM, VOCAB).init(device),
        }
    }

    pub(crate) fn loss(&self, (tokens, targets): TokenBatch) -> Tensor<1> {
        let mut x = self.embed.forward(tokens);
        for block in &self.blocks {
            let dtype = x.dtype();
            let wide = x.clone().cast(block.norm.gamma.val().dtype());
            let y = gelu(block.up.forward(block.norm.forward(wide).cast(dtype)));
            x = x + block.down.forward(y);
        }
        // The embedding's weight is also read here, so its gradient is the sum of two.
        let logits = self.head.forward(x.clone())
            + x.matmul(self.embed.weight.val().transpose().unsqueeze());
        let wanted = logits.gather(2, targets.unsqueeze_dim(2));
        (wanted - 1).powf_scalar(2.0).mean()
    }
}

/// The type in which the parameter at a path computes, and the type in which gradients travel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Case {
    pub(crate) compute: Option<FloatDType>,
    pub(crate) reduce: Option<FloatDType>,
    pub(crate) wide_norms: bool,
}

pub(crate) const CASES: [Case; 5] = [
    Case {
        compute: Some(FloatDType::BF16),
        reduce: None,
        wide_norms: false,
    },
    Case {
        compute: Some(FloatDType::BF16),
        reduce: None,
        wide_norms: true,
    },
    Case {
        compute: Some(FloatDType::BF16),
        reduce: Some(FloatDType::F32),
        wide_norms: true,
    },
    Case {
        compute: Some(FloatDType::BF16),
        reduce: Some(FloatDType::BF16),
        wide_norms: true,
    },
    Case {
        compute: None,
        reduce: Some(FloatDType::BF16),
        wide_norms: false,
    },
];

impl Case {
    pub(crate) fn precision(self) -> Precision {
        let precision = match self.compute {
            Some(compute) => Precision::new(compute),
            None => Precision::default(),
        };
        let precision = if self.wide_norms {
            precision.full_in(["**.norm"])
        } else {
            precision
        };
        match self.reduce {
            Some(reduce) => precision.reduce(reduce),
            None => precision,
        }
    }

    fn computes(self, path: &str) -> FloatDType {
        match self.compute {
            Some(compute) if !(self.wide_norms && path.contains("norm")) => compute,
            _ => FloatDType::F32,
        }
    }
}

/// Casts every parameter, with gradients that return to the parameter that was cast.
pub(crate) struct Cast(pub(crate) Case, pub(crate) Vec<String>);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let compute = self.0.computes(&self.1.join("."));
        Param::initialized(param.id, param.val().cast(compute))
    }
    fn enter_module(&mut self, name: &str, _: &str) {
        self.1.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.1.pop();
    }
}

/// The mean of the gradients of all parts, each rounded to the type in which it travels.
pub(crate) struct Mean<'a> {
    pub(crate) case: Case,
    pub(crate) path: Vec<String>,
    pub(crate) parts: &'a [GradientsParams],
    pub(crate) mean: GradientsParams,
}

impl ModuleVisitor for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.val().is_require_grad() {
            return;
        }
        let travels = self.case.reduce;
        let travels = travels.unwrap_or(self.case.computes(&self.path.join(".")));
        let parts = self.parts.iter().map(|part| {
            let gradient = part.get::<D>(param.id).expect("each has one");
            gradient.cast(travels).cast(FloatDType::F32)
        });
        let sum = parts.reduce(|sum, part| sum + part).expect("a part");
        let mean = sum.mul_scalar(1.0 / self.parts.len() as f32);
        self.mean.register(param.id, mean);
    }
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

pub(crate) type Trained = (Vec<f64>, BTreeMap<String, Vec<f32>>);

/// Runs Burn's loop over the parts of each batch.
fn expected(case: Case, parts: usize) -> Trained {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Net::new(&device);
    let _ = floats(&model);
    let mut optimizer = sgd().init();
    let rows = ROWS / parts;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut loss = 0.0;
        let gradients: Vec<_> = (0..parts)
            .map(|part| {
                let cast = model.clone().map(&mut Cast(case, Vec::new()));
                let value = cast.loss(tokens(step, part * rows, rows, &device));
                let value = value.cast(FloatDType::F32);
                loss += f64::from(value.clone().into_scalar::<f32>()) / parts as f64;
                GradientsParams::from_grads(value.backward(), &model)
            })
            .collect();
        let mut mean = Mean {
            case,
            path: Vec::new(),
            parts: &gradients,
            mean: GradientsParams::new(),
        };
        model.visit(&mut mean);
        losses.push(loss);
        let mean = mean.mean;
        model = optimizer.step(1e-2, model, mean);
    }
    let parameters = floats(&model).into_iter();
    let parameters = parameters.map(|(path, data)| (path, data.try_to_vec().unwrap()));
    (losses, parameters.collect())
}

fn trained(
    num_ranks: usize,
    mode: impl Fn(ProcessGroup) -> Result<Mode, Error> + Send + Sync + 'static,
) -> Trained {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<Trained, Error> {
        let device = Device::flex();
        let (rank, rows) = (world.rank(), ROWS / world.size());
        let mut step = compile(Net::new, Net::loss, sgd().build(), mode(world)?.verified())?;
        let mut losses = Vec::new();
        for index in 0..STEPS {
            losses.push(step.step(1e-2, &tokens(index, rank * rows, rows, &device))?);
        }
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let mut parameters = BTreeMap::new();
        for path in paths {
            let values = step.parameter(&path)?.try_to_vec::<f32>();
            parameters.insert(path.to_string(), values.expect("masters are of 32 bits"));
        }
        Ok((losses, parameters))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

/// With 32-bit sums in the same order, all is equal up to the rounding caused by the order of factors.
pub(crate) fn assert_close(what: &str, got: &Trained, want: &Trained) {
    for (step, (loss, wanted)) in got.0.iter().zip(&want.0).enumerate() {
        assert!(
            (loss - wanted).abs() <= 1e-4 * wanted,
            "{what}, step {step}: loss {loss}, not {wanted}"
        );
    }
    assert_eq!(got.1.len(), want.1.len());
    for (path, values) in &got.1 {
        for (value, wanted) in values.iter().zip(&want.1[path]) {
            assert!(
                (value - wanted).abs() <= 1e-5,
                "{what}, {path}: {value}, not {wanted}"
            );
        }
    }
}

fn options(case: Case) -> Options {
    Options::default()
        .kernels(false)
        .precision(case.precision())
}

#[test]
fn halves_match_burn_on_every_rank() {
    let _guard = seeded();
    for case in CASES {
        for ranks in 1..=4 {
            let want = expected(case, ranks);
            for strategy in [Strategy::FullShard, Strategy::NoShard] {
                let mode =
                    move |world| Ok(Mode::data_parallel(world, strategy).options(options(case)));
                let got = trained(ranks, mode);
                let what = format!("{case:?}, {strategy} on {ranks}");
                assert_close(&what, &got, &want);
                assert_eq!(got.1, want.1, "{what}: ranks add up in their order");
            }
        }
    }
}

#[test]
fn every_schedule_computes_the_same_halves() {
    let _guard = seeded();
    let case = CASES[1];
    let want = expected(case, 2);
    let small = Bucket {
        first_bytes: 300,
        cap_bytes: 700,
    };
    let options = options(case);
    let schedules = [
        Options::none().precision(case.precision()),
        options.clone().prefetch(true).bucket(small),
        options.clone().optimizer(OptimizerPlace::InNextForward),
        options
            .clone()
            .optimizer(OptimizerPlace::AtEnd)
            .prefetch(true),
        options.clone().reshard_after_forward(false),
    ];
    for options in schedules {
        let what = format!("{options:?}");
        let mode = move |world| {
            Ok(Mode::data_parallel(world, Strategy::FullShard).options(options.clone()))
        };
        assert_close(&what, &trained(2, mode), &want);
    }
    let want = expected(case, 4);
    let mode = move |world: ProcessGroup| {
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh).expect("four ranks");
        let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard)?;
        Ok(mode.options(options.clone()))
    };
    assert_close("hybrid", &trained(4, mode), &want);
}

#[test]
fn half_precision_halves_traffic() {
    let _guard = seeded();
    let bytes = |precision: Precision| {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let options = Options::default().precision(precision.clone());
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).options(options);
            let mut step = compile(Net::new, Net::loss, sgd().build(), mode.verified())?;
            let batch = tokens(0, 0, 3, &Device::flex());
            step.step(1e-2, &batch)?;
            let of = |kind| world.counts().of(kind).bytes;
            let moved = [OperationKind::AllGather, OperationKind::ReduceScatter].map(of);
            let graph = step.graph().expect("it has run");
            let reductions = graph.nodes().iter().filter_map(|node| {
                let collective = node.collective.as_ref()?;
                let is = collective.kind == CollectiveKind::ReduceScatter;
                is.then(|| collective.parts.clone())
            });
            let parts: Vec<_> = reductions.flatten().collect();
            Ok((moved, parts))
        };
        launch(LaunchConfig::new(2), body).unwrap().swap_remove(0)
    };
    let (full, _) = bytes(Precision::default());
    let (half, parts) = bytes(Precision::new(FloatDType::BF16));
    assert_eq!(half[1] * 2, full[1], "gradients");
    assert!(parts.iter().all(|part| part.dtype == DType::BF16));
    assert!(parts.iter().all(|part| part.result == DType::F32));
    let (wide, parts) = bytes(Precision::new(FloatDType::BF16).reduce(FloatDType::F32));
    assert_eq!(wide[1], full[1]);
    assert!(parts.iter().all(|part| part.dtype == DType::F32));
    assert_eq!(half[0], wide[0], "weights");
    assert_eq!(half[0] * 2, full[0], "weights");
}

#[test]
fn unsupported_half_precision_is_rejected() {
    let _guard = seeded();
    let compiled = |mode: Mode| {
        let step = compile(Net::new, Net::loss, sgd().build(), mode);
        step.map(|_| ()).unwrap_err().to_string()
    };
    let solo = |precision: Precision, style: DataParallel| {
        let options = Options::default().precision(precision);
        Mode::data_parallel(ProcessGroup::solo(), style).options(options)
    };
    let full = DataParallel::from(Strategy::FullShard);
    let said = compiled(solo(Precision::new(FloatDType::F16), full));
    assert!(
        said.contains("f16") && said.contains("Options::scale_loss"),
        "{said}"
    );
    let said = compiled(solo(Precision::default().reduce(FloatDType::F16), full));
    assert!(said.contains("f16"), "{said}");
    for other in [FloatDType::F64, FloatDType::Flex32] {
        let said = compiled(solo(Precision::new(other), full));
        assert!(said.contains("f64 or flex32"), "{said}");
    }
    let bf16 = Precision::new(FloatDType::BF16);
    let automatic = solo(Precision::new(FloatDType::F16), DataParallel::Automatic);
    let said = compiled(automatic);
    assert!(said.contains("Options::scale_loss"), "{said}");
    let said = compiled(solo(bf16.full_in(["nrom"]), full));
    assert!(said.contains("nrom") && said.contains("norm"), "{said}");
}

/// Statistics of a batch, kept from step to step.
#[derive(Module, Debug)]
struct Normed {
    inner: Linear,
    other: Linear,
    norm: BatchNorm,
}

impl Normed {
    fn new(device: &Device) -> Self {
        Self {
            inner: LinearConfig::new(5, 7).init(device),
            other: LinearConfig::new(5, 7).init(device),
            norm: BatchNormConfig::new(7).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = x.cast(self.inner.weight.val().dtype());
        let x = self.inner.forward(x.clone()) + self.other.forward(x * 2);
        let wide = x.cast(DType::F32).unsqueeze_dim::<3>(2);
        self.norm.forward(wide).powf_scalar(4.0).mean()
    }
}

fn rows(step: usize, device: &Device) -> Tensor<2> {
    let values = (0..20).map(|i| ((i * 37 + step * 11) % 17) as f32 / 5.0 - 1.0);
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [4, 5]), device)
}

#[test]
fn running_statistics_match_burn() {
    let _guard = seeded();
    for case in [CASES[1], CASES[4]] {
        let device = Device::flex().autodiff();
        device.seed(1);
        let mut model = Normed::new(&device);
        let _ = floats(&model);
        let mut optimizer = sgd().init();
        for index in 0..4 {
            let cast = model.clone().map(&mut Cast(case, Vec::new()));
            let value = cast.loss(rows(index, &device));
            let parts = [GradientsParams::from_grads(value.backward(), &model)];
            let mut mean = Mean {
                case,
                path: Vec::new(),
                parts: &parts,
                mean: GradientsParams::new(),
            };
            model.visit(&mut mean);
            let mean = mean.mean;
            // The model takes over the copy's statistics when its mode changes.
            model = optimizer.step(1e-2, model, mean).train();
        }
        let want = floats(&model);
        Device::flex().seed(1);
        let mode = Mode::single().options(options(case)).verified();
        let mut step = compile(Normed::new, Normed::loss, sgd().build(), mode).unwrap();
        for index in 0..4 {
            step.step(1e-2, &rows(index, &Device::flex())).unwrap();
        }
        for (path, want) in want {
            assert_eq!(step.parameter(&path).unwrap(), want, "{case:?}: {path}");
        }
        let graph = step.graph().unwrap();
        let gradients = graph.parameters().iter().filter_map(|p| p.gradient);
        let gradients: Vec<_> = gradients.collect();
        let distinct: std::collections::BTreeSet<_> = gradients.iter().collect();
        assert_eq!(
            distinct.len(),
            gradients.len(),
            "each parameter has its own"
        );
    }
}
