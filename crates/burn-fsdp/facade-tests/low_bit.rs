//! Optimizer states in fewer bits: bit for bit those of one rank, however they are cut, saved and resumed.

mod fixed;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{
    AdamW, AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, RecordState, Sgd, SgdConfig,
    StateSink, StateSource, momentum::MomentumConfig,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp::internals::optim::check_same_optimizer;
use burn_fsdp::internals::state::{LocalPart, full_state, local_ids, local_state};
use burn_fsdp::optim::{LowBitOptimizer, StateFormat, check_elementwise};
use burn_fsdp::sharding::Cut;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward, catch,
    fully_shard, launch, resume, save,
};
use peak_alloc::PeakAlloc;

use crate::fixed::Fixed;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Runs tests one at a time, because they share the heap.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const FORMATS: [StateFormat; 2] = [StateFormat::Bf16, StateFormat::Block8];

/// Parameters of less than a block and of several blocks and a part, and vectors.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(9, 37).init(device),
            second: LinearConfig::new(37, 41).init(device),
            head: LinearConfig::new(41, 3).with_bias(false).init(device),
        }
    }

    fn loss(&self, step: u64, device: &Device) -> Tensor<1> {
        let value = |i: u64| ((i * 7 + step * 5) % 13) as f32 / 13.0 - 0.4;
        let values: Vec<f32> = (0..16 * 9).map(value).collect();
        let x = Tensor::<2>::from_data(TensorData::new(values, [16, 9]), device);
        let x = self.first.forward(x).tanh();
        let x = self.second.forward(x).tanh();
        (self.head.forward(x) - 0.3).square().mean()
    }
}

fn net(device: &Device) -> Net {
    // All tests of this process share Burn's generator.
    Net::new(device).map(&mut Fixed(0))
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

fn policy(format: StateFormat, cut: Cut) -> ShardPolicy {
    let policy = ShardPolicy::new().units(["second"]).shard_vectors(true);
    match format {
        StateFormat::Bf16 => policy.cut(cut),
        StateFormat::Block8 => policy.cut(Cut::Multiples(StateFormat::BLOCK)),
    }
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

/// An element's gradient: of all sizes, including zero, and different in each step.
fn gradient(path: &str, element: usize, step: u64) -> f32 {
    let seed = path
        .bytes()
        .fold(step + 1, |seed, byte| seed * 31 + u64::from(byte));
    let number = (seed % 1_000_003) * 65_537 + element as u64 * 2_654_435_761;
    let size = [1.0, 1e-1, 1e-3, 1e-6, 1e-12, 1e-25, 0.0][(number / 3 % 7) as usize];
    ((number % 2003) as f32 / 1000.0 - 1.0) * size
}

/// Values by path.
type Params = BTreeMap<String, Vec<f32>>;

// The oracle makes the same update with Burn's plain optimizer on whole tensors in 32 bits. The code here rounds its states, and is
// written only from the documentation.

fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

fn draw(name: &str, roundings: u64, element: usize) -> u32 {
    let mut seed = mixed(roundings);
    for byte in name.bytes() {
        seed = mixed(seed ^ u64::from(byte));
    }
    (mixed(seed ^ element as u64) >> 32) as u32
}

/// Rounds to 8 bits of precision by arithmetic.
fn rounded_to_bf16(value: f32, draw: u32) -> f32 {
    let size = f64::from(value.abs());
    if size == 0.0 {
        return value;
    }
    let mut unit = 2f64.powi(-133);
    while size / unit >= 256.0 {
        unit *= 2.0;
    }
    let below = (size / unit).floor();
    let part = size / unit - below;
    let is_up = part > 0.0 && f64::from(draw % 65536) / 65536.0 >= 1.0 - part;
    let size = if is_up || below == 0.0 {
        below + 1.0
    } else {
        below
    } * unit;
    size.copysign(f64::from(value)) as f32
}

fn levels() -> Vec<f32> {
    let mut levels = vec![0.0];
    for (len, tenth) in [
        (1, 1e-6),
        (2, 1e-5),
        (4, 1e-4),
        (8, 1e-3),
        (16, 1e-2),
        (32, 1e-1),
        (64, 1.0),
    ] {
        for i in 0..len {
            let middle = 0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(len);
            levels.push((middle * tenth) as f32);
        }
    }
    *levels.last_mut().expect("127") = 1.0;
    levels
}

fn rounded_to_levels(values: &[f32], name: &str, roundings: u64) -> Vec<f32> {
    let levels = levels();
    assert_eq!(levels.len(), 128);
    let mut rounded = Vec::new();
    for (block, values) in values.chunks(256).enumerate() {
        let largest = values.iter().map(|value| value.abs()).fold(0.0, f32::max);
        for (at, value) in values.iter().enumerate() {
            let size = value.abs();
            let mut code = 0;
            while code < 127 && levels[code + 1] * largest <= size {
                code += 1;
            }
            if code < 127 {
                let (below, above) = (levels[code] * largest, levels[code + 1] * largest);
                let part = f64::from(size - below) / f64::from(above - below);
                let draw = draw(name, roundings, block * 256 + at);
                if f64::from(draw) / 4_294_967_296.0 < part || below == 0.0 && size > 0.0 {
                    code += 1;
                }
            }
            rounded.push((levels[code] * largest).copysign(*value));
        }
    }
    rounded
}

/// Rounds a state's tensors.
fn rounded<S: RecordState>(state: &S, format: StateFormat, roundings: u64) -> S {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    let mut source = StateSource::new(sink.scalars.into_iter().collect());
    for (name, data) in sink.tensors {
        let shape = data.shape().clone();
        let values = data.try_to_vec::<f32>().expect("floats");
        let values = match format {
            StateFormat::Bf16 => {
                let values = values.iter().enumerate();
                let rounded = |(at, value): (usize, &f32)| {
                    rounded_to_bf16(*value, draw(&name, roundings, at))
                };
                values.map(rounded).collect()
            }
            StateFormat::Block8 => rounded_to_levels(&values, &name, roundings),
        };
        source.insert_tensor(name, TensorData::new(values, shape));
    }
    S::state_unflatten("", &mut source, &Device::flex()).expect("the same names")
}

fn steps_of<O: Optimizer, const D: usize>(
    optimizer: &O,
    format: StateFormat,
    (path, value): (&str, Tensor<D>),
    steps: u64,
) -> Vec<f32> {
    let mut value = value.inner();
    let mut state = None;
    for step in 0..steps {
        let len = value.shape().num_elements();
        let values: Vec<f32> = (0..len).map(|i| gradient(path, i, step)).collect();
        let gradient = Tensor::from_data(TensorData::new(values, value.shape()), &Device::flex());
        let (stepped, new) = optimizer.step(1e-2, value, gradient, state);
        value = stepped;
        state = new.map(|state| rounded(&state, format, step));
    }
    value.into_data().try_to_vec().expect("floats")
}

fn oracle<O: Optimizer>(optimizer: &O, format: StateFormat, steps: u64) -> Params {
    let Net {
        first,
        second,
        head,
    } = net(&device());
    let mut params = Params::new();
    for (name, layer) in [("first", first), ("second", second), ("head", head)] {
        let path = format!("{name}.weight");
        let stepped = steps_of(optimizer, format, (&path, layer.weight.val()), steps);
        params.insert(path, stepped);
        if let Some(bias) = layer.bias {
            let path = format!("{name}.bias");
            let stepped = steps_of(optimizer, format, (&path, bias.val()), steps);
            params.insert(path, stepped);
        }
    }
    params
}

/// The gradients of the elements that this rank holds.
fn gradients(net: &Net, step: u64) -> Result<GradientsParams, Error> {
    let mut gradients = GradientsParams::new();
    for (local, id) in local_state(net)?.into_iter().zip(local_ids(net)?) {
        assert_eq!(local.path, id.path);
        let values = |range: std::ops::Range<usize>| -> Vec<f32> {
            range.map(|i| gradient(&local.path, i, step)).collect()
        };
        match (local.part, &local.shape[..]) {
            (LocalPart::Shard { range, .. }, _) => {
                let len = range.len();
                let data = TensorData::new(values(range), [len]);
                gradients.register(id.id, Tensor::<1>::from_data(data, &Device::flex()));
            }
            (_, [rows, columns]) => {
                let data = TensorData::new(values(0..rows * columns), [*rows, *columns]);
                gradients.register(id.id, Tensor::<2>::from_data(data, &Device::flex()));
            }
            (_, shape) => {
                let data = TensorData::new(values(0..shape[0]), [shape[0]]);
                gradients.register(id.id, Tensor::<1>::from_data(data, &Device::flex()));
            }
        }
    }
    Ok(gradients)
}

/// The whole parameters. All ranks must call it.
fn whole(net: &Net) -> Result<Params, Error> {
    let mut params = Params::new();
    full_state(net, |tensor| {
        let (words, _) = tensor.bytes.as_chunks::<4>();
        let values = words.iter().map(|word| f32::from_ne_bytes(*word)).collect();
        params.insert(tensor.path.to_owned(), values);
    })?;
    Ok(params)
}

/// Resumes from the first folder, trains up to `until` steps and saves in the second. Returns rank 0's parameters.
fn trained<O: Optimizer>(
    optimizer: &O,
    format: StateFormat,
    (ranks, cut): (usize, Cut),
    until: u64,
    [from, to]: [&Path; 2],
) -> Params {
    let (from, to) = (from.to_owned(), to.to_owned());
    let optimizer = optimizer.clone();
    let done = on_ranks(ranks, move |world| {
        let mesh = line(&world)?;
        let model = fully_shard(net(&device()), &mesh, policy(format, cut))?;
        let optimizer = LowBitOptimizer::new(optimizer.clone(), format);
        let optimizer = ModuleOptimizer::from(optimizer);
        check_elementwise(&model, &optimizer)?;
        check_same_optimizer(&model, &optimizer)?;
        let resumed = resume(&from, model, optimizer, &mesh)?;
        let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
        for step in resumed.step..until {
            let gradients = gradients(&net, step)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        save(&to, until, &net, &optimizer, &mesh)?;
        whole(&net)
    });
    done.into_iter().next().expect("a rank")
}

fn assert_bits(got: &Params, want: &Params, what: &str) {
    assert_eq!(got.len(), 5, "{what}");
    for (path, got) in got {
        let want = &want[path];
        assert_eq!(got.len(), want.len());
        let differs = |i: &usize| got[*i].to_bits() != want[*i].to_bits();
        let different: Vec<_> = (0..got.len()).filter(differs).collect();
        if let Some(i) = different.first() {
            let (n, got, want) = (different.len(), got[*i], want[*i]);
            panic!("{what}: {n} of {path}, the first is {i}: {got}, expected {want}");
        }
    }
}

fn adamw() -> AdamW {
    AdamWConfig::new().with_amsgrad(true).build()
}

fn momentum() -> Sgd {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .build()
}

fn assert_matches_one_rank<O: Optimizer>(optimizer: &O, name: &str) {
    for format in FORMATS {
        let want = oracle(optimizer, format, 6);
        let exact = oracle_in_32_bits(optimizer, 6);
        assert_ne!(want, exact, "{name}: rounding is seen");
        for ranks in 1..=4 {
            for cut in [Cut::Elements, Cut::Dims] {
                let folder = tempfile::tempdir().expect("a folder");
                let got = trained(optimizer, format, (ranks, cut), 6, [folder.path(); 2]);
                assert_bits(
                    &got,
                    &want,
                    &format!("{name}, {format:?}, {ranks} ranks, {cut}"),
                );
            }
        }
    }
}

fn oracle_in_32_bits<O: Optimizer>(optimizer: &O, steps: u64) -> Params {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let optimizer = optimizer.clone();
    let done = on_ranks(1, move |world| {
        let mesh = line(&world)?;
        let mut net = fully_shard(net(&device()), &mesh, ShardPolicy::new())?;
        let mut optimizer = ModuleOptimizer::from(optimizer.clone());
        for step in 0..steps {
            let gradients = gradients(&net, step)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        save(&path, steps, &net, &optimizer, &mesh)?;
        whole(&net)
    });
    done.into_iter().next().expect("a rank")
}

#[test]
fn results_match_one_rank_bit_for_bit() {
    let _alone = alone();
    assert_matches_one_rank(&adamw(), "AdamW");
    assert_matches_one_rank(&momentum(), "SGD");
}

/// States that are saved in 32 bits, cut differently and rounded again keep their values.
#[test]
fn steps_resume_on_other_ranks_bit_for_bit() {
    let _alone = alone();
    for format in FORMATS {
        let want = oracle(&adamw(), format, 8);
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let [first, second] = folders.each_ref().map(|folder| folder.path());
        let mut got = Params::new();
        for (until, ranks, cut, folders) in [
            (2, 2, Cut::Elements, [first, first]),
            (3, 3, Cut::Dims, [first, first]),
            // Saved again without a step.
            (3, 4, Cut::Elements, [first, second]),
            (5, 1, Cut::Elements, [second, second]),
            (8, 4, Cut::Elements, [second, second]),
        ] {
            got = trained(&adamw(), format, (ranks, cut), until, folders);
        }
        assert_bits(&got, &want, &format!("{format:?}"));
    }
}

/// States of another kind are not accepted silently.
#[test]
fn a_plain_optimizer_rejects_low_bit_states() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let (format, ranks) = (StateFormat::Block8, (2, Cut::Elements));
    trained(&adamw(), format, ranks, 2, [folder.path(); 2]);
    let path = folder.path().to_owned();
    let refused = on_ranks(2, move |world| {
        let mesh = line(&world)?;
        let model = fully_shard(net(&device()), &mesh, ShardPolicy::new())?;
        let resumed = resume(&path, model, adamw().into(), &mesh);
        Ok(resumed.expect_err("another optimizer").to_string())
    });
    for message in refused {
        assert!(message.contains("num_roundings"), "{message}");
    }
}

/// Even a rank whose own shard divides no block rejects them.
#[test]
fn shards_that_divide_a_block_are_refused_by_all_ranks() {
    let _alone = alone();
    let refused = on_ranks(4, |world| {
        let mesh = line(&world)?;
        let policy = ShardPolicy::new().units(["second"]);
        let model = fully_shard(net(&device()), &mesh, policy)?;
        let optimizer = LowBitOptimizer::new(adamw(), StateFormat::Block8);
        let mut optimizer = ModuleOptimizer::from(optimizer);
        let gradients = backward(model.loss(0, &device()), &model)?;
        let refused = catch(|| optimizer.step(1e-2, model, gradients));
        Ok(refused.expect_err("blocks in two shards").to_string())
    });
    for message in refused {
        assert!(
            message.contains("Cut::Multiples(StateFormat::BLOCK)"),
            "{message}"
        );
        assert!(
            message.contains("`first.weight` has 333 elements in 4 shards of 84"),
            "{message}"
        );
    }
}

/// Parameters in 16 bits would also have states in 16 bits.
#[test]
fn states_of_other_types_are_refused() {
    let _alone = alone();
    let refused = catch(|| {
        let optimizer = LowBitOptimizer::new(adamw(), StateFormat::Block8);
        let half = || Tensor::<1>::ones([8], (&Device::flex(), DType::BF16));
        optimizer.step(1e-2, half(), half(), None)
    });
    let message = refused.err().expect("of 16 bits").to_string();
    assert!(message.contains("BF16"), "{message}");
}

/// Half and a quarter of AdamW's states in 32 bits.
#[test]
fn states_shrink_to_a_half_and_a_quarter() {
    let _alone = alone();
    const SIDE: usize = 1024;
    let wide = 2 * 4 * SIDE * SIDE;
    for (format, most) in [
        (StateFormat::Bf16, wide / 2),
        (StateFormat::Block8, wide * 26 / 100),
    ] {
        let optimizer = LowBitOptimizer::new(AdamWConfig::new().build(), format);
        let tensor = |scale: f32| {
            let values: Vec<f32> = (0..SIDE * SIDE).map(|i| scale * (i % 97) as f32).collect();
            Tensor::<2>::from_data(TensorData::new(values, [SIDE, SIDE]), &Device::flex())
        };
        let (mut value, gradient) = (tensor(1.0), tensor(0.1));
        let before = HEAP.current_usage();
        let mut state = None;
        for _ in 0..3 {
            (value, state) = optimizer.step(1e-2, value, gradient.clone(), state);
        }
        let held = HEAP.current_usage().saturating_sub(before);
        assert!(state.is_some() && value.shape().num_elements() > 0);
        assert!(held <= most + 4096, "{format:?}: {held} B, at most {most}");
        assert!(held > most / 2, "{format:?}: {held} B are measured");
    }
}

fn second_moment<S: RecordState>(state: &S) -> Vec<f32> {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    let mut tensors = sink.tensors.into_iter();
    let (_, data) = tensors
        .find(|(name, _)| name.ends_with("moment_2"))
        .expect("AdamW keeps it");
    assert_eq!(data.dtype(), DType::F32);
    data.try_to_vec().expect("floats")
}

/// With rounding to nearest it would stop at a third of its limit, where each step adds less than half of the type's resolution.
#[test]
fn averages_converge_despite_rounding() {
    let _alone = alone();
    for format in FORMATS {
        let optimizer = LowBitOptimizer::new(AdamWConfig::new().build(), format);
        let mut value = Tensor::<1>::zeros([512], &Device::flex());
        let gradient = Tensor::<1>::ones([512], &Device::flex());
        // The gradients differ, because the largest element of a block never stands still.
        let scales: Vec<f32> = (0..512).map(|i| 0.5 + (i % 16) as f32 / 32.0).collect();
        let gradient =
            gradient * Tensor::from_data(TensorData::new(scales.clone(), [512]), &Device::flex());
        let mut state = None;
        for _ in 0..3000 {
            (value, state) = optimizer.step(1e-3, value, gradient.clone(), state);
        }
        let reached = 1.0 - 0.999f32.powi(3000);
        let got = second_moment(&state.expect("a state"));
        let ratios = got
            .iter()
            .zip(&scales)
            .map(|(got, g)| got / (g * g * reached));
        let mean = ratios.sum::<f32>() / 512.0;
        assert!((mean - 1.0).abs() < 0.02, "{format:?}: {mean}");
    }
}

/// The loss is similar to training in 32 bits.
#[test]
fn the_loss_falls_as_far_as_in_32_bits() {
    let _alone = alone();
    let run = |optimizer: fn() -> ModuleOptimizer| {
        let losses = on_ranks(2, move |world| {
            let policy = policy(StateFormat::Block8, Cut::Elements);
            let mut model = fully_shard(net(&device()), &line(&world)?, policy)?;
            let mut optimizer = optimizer();
            let mut losses = Vec::new();
            for step in 0..150 {
                let loss = model.loss(step, &device());
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = backward(loss, &model)?;
                model = optimizer.step(2e-3, model, gradients);
            }
            Ok((losses[0], losses[130..].iter().sum::<f32>() / 20.0))
        });
        losses[0]
    };
    let (first, wide) = run(|| AdamWConfig::new().with_epsilon(1e-8).init());
    assert!(wide < 0.2 * first, "{first}, then {wide}");
    let bf16 = run(|| {
        let adamw = AdamWConfig::new().with_epsilon(1e-8).build();
        LowBitOptimizer::new(adamw, StateFormat::Bf16).into()
    });
    let block8 = run(|| {
        let adamw = AdamWConfig::new().with_epsilon(1e-8).build();
        LowBitOptimizer::new(adamw, StateFormat::Block8).into()
    });
    for (format, (_, got)) in [("bf16", bf16), ("8 bits", block8)] {
        assert!(got < 1.2 * wide, "{format}: {got}, in 32 bits {wide}");
    }
}
