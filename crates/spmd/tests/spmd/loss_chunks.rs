//! Losses that are computed for some rows at a time.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_kernels::cross_entropy;
use burn_fsdp_mesh::{Clip, LossScaling, Mesh, Placement};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{
    CompiledStep, Error, Evaluation, Expand, Loss, Mode, OptionError, Precision, Strategy, compile,
};

use crate::compiled::seeded;
use crate::eager;
use crate::models::{TIME, rows_of_sequences};

const STEPS: usize = 3;
/// Sequences of all ranks.
const SEQUENCES: usize = 12;
const DIM: usize = 5;
const CLASSES: usize = 41;

/// What follows the head.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// The kernel.
    Fused,
    Burn,
    /// Burn's, whose mean is over some of the rows.
    Padded,
    Weighted,
    Smoothed,
    /// Logits in a range, as in Gemma 2.
    Capped,
    /// Weights of tokens, as in fine-tuning.
    OfTokens,
    /// No classes at all.
    Squares,
    /// Logits of three dims, without and with a bias.
    Sequences,
    Biased,
    /// A vocabulary that is padded to more columns.
    PaddedColumns,
    /// Columns that are set in all sequences.
    Masked,
    /// Logits of three dims as a matrix.
    AsMatrix,
}

use Kind::{
    AsMatrix, Biased, Burn, Capped, Fused, Masked, OfTokens, Padded, PaddedColumns, Sequences,
    Smoothed, Squares, Weighted,
};

const KINDS: [Kind; 13] = [
    AsMatrix,
    Masked,
    PaddedColumns,
    Biased,
    Fused,
    Burn,
    Padded,
    Weighted,
    Smoothed,
    Capped,
    OfTokens,
    Squares,
    Sequences,
];

#[derive(Module, Debug)]
struct Classifier {
    body: Linear,
    head: Linear,
    #[module(skip)]
    kind: Kind,
}

impl Classifier {
    fn of(kind: Kind, device: &Device) -> Self {
        Self {
            body: LinearConfig::new(DIM, DIM).init(device),
            head: LinearConfig::new(DIM, CLASSES)
                .with_bias(!matches!(kind, Capped | Sequences))
                .init(device),
            kind,
        }
    }

    fn hidden(&self, x: Tensor<3>) -> Tensor<3> {
        self.body.forward(x).tanh()
    }

    fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        self.head.forward(self.hidden(x))
    }

    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let device = x.device();
        let x = x.cast(self.body.weight.dtype());
        let [sequences, time, _] = x.dims();
        let rows = sequences * time;
        let targets = x.clone().narrow(2, 0, 1).abs().mul_scalar(37.0).int();
        let targets = targets.remainder_scalar(CLASSES as i64).reshape([rows]);
        let hidden = self.hidden(x.clone());
        let logits = if self.kind == AsMatrix {
            self.head.forward(hidden).reshape([rows, CLASSES])
        } else if matches!(self.kind, Sequences | Biased | Masked) {
            let mut logits = self.head.forward(hidden);
            if self.kind == Masked {
                let low = Tensor::<3>::full([sequences, time, 4], -9.0, &device);
                let low = low.cast(logits.dtype());
                logits = logits.slice_assign([0..sequences, 0..time, 3..7], low);
            }
            let classes = targets.reshape([sequences, time, 1]);
            return log_softmax(logits, 2).gather(2, classes).mean().neg();
        } else {
            self.head.forward(hidden.reshape([rows, DIM]))
        };
        let burn = CrossEntropyLossConfig::new();
        match self.kind {
            Fused => cross_entropy(logits, targets),
            Burn | Sequences | Biased | Masked | AsMatrix => {
                burn.init(&device).forward(logits, targets)
            }
            Padded => {
                let burn = burn.with_pad_tokens(Some(vec![1, 2, 3]));
                burn.init(&device).forward(logits, targets)
            }
            Weighted => {
                let weights = (0..CLASSES).map(|class| 0.5 + class as f32 / 9.0).collect();
                let burn = burn.with_weights(Some(weights));
                burn.init(&device).forward(logits, targets)
            }
            Smoothed => {
                let burn = burn.with_smoothing(Some(0.1));
                burn.init(&device).forward(logits, targets)
            }
            Capped => {
                let logits = logits.div_scalar(3.0).tanh().mul_scalar(3.0);
                burn.init(&device).forward(logits, targets)
            }
            OfTokens => {
                let weights = x.narrow(2, 1, 1).abs().reshape([rows, 1]);
                let own = log_softmax(logits, 1).gather(1, targets.reshape([rows, 1]));
                (own * weights).mean().neg()
            }
            PaddedColumns => {
                let logits = logits.narrow(1, 0, CLASSES - 3);
                let targets = targets.remainder_scalar(CLASSES as i64 - 3);
                burn.init(&device).forward(logits, targets)
            }
            Squares => logits.square().mean(),
        }
    }
}

fn batch(step: usize, first: usize, sequences: usize, device: &Device) -> Tensor<3> {
    rows_of_sequences(step, DIM, first..first + sequences, device)
}

fn compiled(kind: Kind, mode: Mode) -> Result<CompiledStep<Tensor<3>>, Error> {
    let init = move |device: &Device| Classifier::of(kind, device);
    let optimizer = eager::adamw().build();
    compile(init, Classifier::loss, optimizer, mode.verified())
}

/// Returns true if a node of the step writes as many elements as all logits.
fn has_logits(step: &CompiledStep<Tensor<3>>, sequences: usize) -> bool {
    let graph = step.graph().expect("it has run");
    let logits = sequences * TIME * CLASSES;
    let mut written = graph
        .nodes()
        .iter()
        .flat_map(|node| node.operation.outputs());
    written.any(|output| output.shape.num_elements() >= logits)
}

#[test]
fn losses_in_parts_match_burn() {
    let _guard = seeded();
    for kind in KINDS {
        let of_all = |step: usize, device: &Device| batch(step, 0, SEQUENCES, device);
        let init = |device: &Device| Classifier::of(kind, device);
        let (optimizer, loss) = (eager::adamw().init(), Classifier::loss);
        let expected = eager::train(init, loss, of_all, STEPS, |_| 1e-2, optimizer);
        let all = Options::default();
        let none = Options::none();
        for (num_ranks, parts, options) in [
            (1, 2, all.clone()),
            (1, 3, all.clone().kernels(false)),
            (1, 12, none.clone()),
            (1, 7, all.clone().fuse(false)),
            (12, 2, all.clone()),
            (2, 3, all.clone().optimizer(OptimizerPlace::InNextForward)),
            (3, 2, all.clone().recompute(None)),
            (4, 3, none.kernels(true)),
        ] {
            // A mean over some rows is not the mean of the ranks' means.
            if num_ranks > 1 && matches!(kind, Padded | Weighted) {
                continue;
            }
            let options = options.loss_chunks(parts);
            Device::flex().seed(1);
            let done = launch(LaunchConfig::new(num_ranks), move |world: ProcessGroup| {
                let (rank, sequences) = (world.rank(), SEQUENCES / world.size());
                let mode = Mode::data_parallel(world, Strategy::FullShard);
                let mut step = compiled(kind, mode.options(options.clone()))?;
                let mut losses = Vec::new();
                for index in 0..STEPS {
                    let rows = batch(index, rank * sequences, sequences, &Device::flex());
                    losses.push(step.step(1e-2, &rows)?);
                }
                assert!(!has_logits(&step, sequences), "{kind:?} in {parts}");
                let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
                let values = paths.into_iter().map(|path| {
                    let value = step.parameter(&path)?;
                    Ok((path.to_string(), value))
                });
                Ok::<_, Error>((losses, values.collect::<Result<Vec<_>, Error>>()?))
            });
            let what = format!("{kind:?} on {num_ranks} in {parts}");
            let mut done = done.unwrap_or_else(|error| panic!("{what}: {error}"));
            let (losses, parameters) = done.swap_remove(0);
            for (loss, expected) in losses.iter().zip(&expected.losses) {
                let expected = f64::from(*expected);
                let is_close = (loss - expected).abs() <= 2e-6 * expected.abs();
                assert!(is_close, "{what}: {loss}, {expected}");
            }
            for (path, found) in parameters {
                let found = found.try_to_vec::<f32>().expect("floats");
                let expected = expected.parameters[&path]
                    .try_to_vec::<f32>()
                    .expect("floats");
                for (found, expected) in found.iter().zip(&expected) {
                    let is_close = (found - expected).abs() <= 2e-5;
                    assert!(is_close, "{what}, {path}: {found}, {expected}");
                }
            }
        }
    }
}

#[test]
fn halves_sums_and_scales_match_the_whole_loss() {
    let _guard = seeded();
    for (name, options) in [
        (
            "bf16",
            Options::default().precision(Precision::new(FloatDType::BF16)),
        ),
        (
            "f16",
            Options::default()
                .precision(Precision::new(FloatDType::F16))
                .scale_loss(LossScaling::default()),
        ),
        ("clipped", Options::default().clip_grad_norm(Clip::to(0.1))),
    ] {
        let trained = [1, 3].map(|parts| {
            let options = options.clone().loss_chunks(parts);
            Device::flex().seed(1);
            let done = launch(LaunchConfig::new(2), move |world: ProcessGroup| {
                let rank = world.rank();
                let mode = Mode::data_parallel(world, Strategy::FullShard);
                let mut step = compiled(Capped, mode.options(options.clone()))?;
                let mut losses = Vec::new();
                for index in 0..STEPS {
                    // Two micro-batches of three sequences.
                    let micro = |of: usize| batch(index, 6 * rank + 3 * of, 3, &Device::flex());
                    losses.push(step.step_accumulated(1e-2, &[micro(0), micro(1)])?);
                }
                let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
                let values = paths.iter().map(|path| {
                    let value = step.parameter(path)?;
                    Ok(value.try_to_vec::<f32>().expect("floats"))
                });
                Ok::<_, Error>((losses, values.collect::<Result<Vec<_>, Error>>()?.concat()))
            });
            done.unwrap_or_else(|error| panic!("{name}: {error}"))
                .swap_remove(0)
        });
        let [(whole, values), (parted, others)] = &trained;
        for (whole, parted) in whole.iter().zip(parted) {
            let is_close = (whole - parted).abs() < 2e-3 * whole.abs();
            assert!(is_close, "{name}: {whole}, {parted}");
        }
        // The rate is 1e-2, and steps of AdamW are about as large.
        let most = if name == "clipped" { 2e-5 } else { 1e-3 };
        for (value, other) in values.iter().zip(others) {
            assert!((value - other).abs() < most, "{name}: {value}, {other}");
        }
    }
}

#[test]
fn evaluations_are_in_parts_and_logits_are_returned_whole() -> Result<(), Error> {
    let _guard = seeded();
    let device = Device::flex();
    let options = Options::default().loss_chunks(3);
    let mut step = compiled(Fused, Mode::single().options(options))?;
    let init = |device: &Device| Classifier::of(Fused, device);
    let mut losses = Evaluation::new(init, Classifier::loss);
    let mut logits = Evaluation::new(init, Classifier::logits);
    let rows = batch(0, 0, SEQUENCES, &device);
    let evaluated: Tensor<1> = step.evaluate(&mut losses, &rows)?;
    let logits: Tensor<3> = step.evaluate(&mut logits, &rows)?;
    assert_eq!(logits.dims(), [SEQUENCES, TIME, CLASSES]);
    let written = losses.graph().expect("it has run").nodes().iter();
    let written = written.flat_map(|node| node.operation.outputs());
    let largest = written.map(|output| output.shape.num_elements()).max();
    assert!(largest < Some(SEQUENCES * TIME * CLASSES));
    let evaluated = f64::from(evaluated.into_scalar::<f32>());
    let trained = step.step(1e-2, &rows)?;
    assert!(
        (evaluated / trained - 1.0).abs() < 1e-6,
        "{evaluated}, {trained}"
    );
    Ok(())
}

#[test]
fn what_a_loss_returns_for_each_row_is_whole() -> Result<(), Error> {
    let _guard = seeded();
    let init = |device: &Device| Classifier::of(Burn, device);
    // The best class and the norm of each row, as for a metric.
    let loss = |model: &Classifier, x: Tensor<3>| {
        let logits = model.logits(x);
        let best = logits.clone().argmax(2);
        let norms = logits.clone().square().sum_dim(2);
        let positive = logits.clone().greater_elem(0.0).int().sum();
        (logits.square().mean(), (best, norms, positive))
    };
    let rows = batch(0, 0, SEQUENCES, &Device::flex());
    let mut seen = Vec::new();
    for parts in [1, 2, 5] {
        Device::flex().seed(1);
        let mode = Mode::single().options(Options::default().loss_chunks(parts));
        let mut step = compile(init, loss, eager::adamw().build(), mode.verified())?;
        let loss = step.step(1e-2, &rows)?;
        let (best, norms, positive): (Tensor<3, Int>, Tensor<3>, Tensor<1, Int>) =
            step.outputs()?.remove(0);
        assert_eq!(
            (best.dims(), norms.dims()),
            ([SEQUENCES, TIME, 1], [SEQUENCES, TIME, 1])
        );
        let best: Vec<i64> = best.into_data().iter().collect();
        let norms: Vec<f32> = norms.into_data().iter().collect();
        let positive: Vec<i64> = positive.into_data().iter().collect();
        seen.push((loss, [best, positive], norms));
    }
    for (loss, best, norms) in &seen[1..] {
        assert!((loss / seen[0].0 - 1.0).abs() < 1e-6);
        assert_eq!(best, &seen[0].1);
        let pairs = norms.iter().zip(&seen[0].2);
        assert!(
            pairs
                .into_iter()
                .all(|(one, other)| (one - other).abs() < 1e-5 * other.abs())
        );
    }
    Ok(())
}

/// Returns why the loss of a model is not computed in parts.
fn refused<O: Loss + 'static>(
    parts: usize,
    mode: impl Fn(Options) -> Mode,
    loss: fn(&Classifier, Tensor<3>) -> O,
) -> String {
    let init = |device: &Device| Classifier::of(Burn, device);
    let mode = mode(Options::default().loss_chunks(parts));
    let rows = batch(0, 0, SEQUENCES, &Device::flex());
    let step = compile(init, loss, eager::adamw().build(), mode);
    let error = step
        .and_then(|mut step| step.step(1e-2, &rows))
        .expect_err("refused");
    assert!(
        matches!(error, Error::Option(OptionError::LossChunks { .. })),
        "{error:?}"
    );
    error.to_string()
}

#[test]
fn losses_that_need_all_rows_are_refused() {
    let _guard = seeded();
    let alone = |options| Mode::single().options(options);
    let loss_of_all = |model: &Classifier, x| model.loss(x).exp();
    let over_rows = |model: &Classifier, x| log_softmax(model.logits(x), 0).mean();
    let linear = |model: &Classifier, x| model.logits(x).mean();
    let of_time = |model: &Classifier, x| log_softmax(model.logits(x).swap_dims(1, 2), 2).mean();
    for (parts, loss, reason) in [
        // Each row's gradient has the mean of all rows.
        (
            2,
            loss_of_all as fn(&Classifier, Tensor<3>) -> Tensor<1>,
            "other rows",
        ),
        (2, over_rows, "all rows at once"),
        (2, linear, "rows and columns of the logits"),
        (2, of_time, "at once"),
        (1000, Classifier::loss, "rows"),
        (0, Classifier::loss, "no number"),
    ] {
        let text = refused(parts, alone, loss);
        assert!(text.contains(reason), "{reason}: {text}");
    }
    let text = refused(2, alone, |model, x| {
        (model.loss(x.clone()), model.head.forward(x))
    });
    assert!(text.contains("a result of the step"), "{text}");
    let placed = |options: Options| {
        let mesh = ProcessMesh::new(
            &ProcessGroup::solo(),
            Mesh::line("rows", 1).expect("a mesh"),
        );
        let expand = Expand::new().input("**", "rows", Placement::Shard(0));
        Mode::expand(mesh.expect("a mesh"), expand).options(options)
    };
    let text = refused(2, placed, Classifier::loss);
    assert!(text.contains("placements"), "{text}");
}
