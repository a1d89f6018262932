//! What the sections share: the device, lines of results, guards, clocks.
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use burn::backend::{Cube, DispatchDevice};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use crate::route::{Route, RouteError};

/// The result of a section or a part of one.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The device under test and the way into it.
pub struct Lab {
    /// Burn's device.
    pub device: Device,
    /// CubeCL's client for it.
    pub client: Client,
    /// The way into CubeCL's memory and streams.
    pub route: Route,
}

impl Lab {
    /// The first CUDA device.
    pub fn open() -> Result<Self, RouteError> {
        let device = Device::cuda(0usize);
        // The first tensor starts the server.
        let first = cube(&Tensor::<1>::zeros([1], &device));
        let client = first.client.clone();
        let route = Route::new(&client)?;
        Ok(Self {
            device,
            client,
            route,
        })
    }

    /// Waits for what this thread has handed to the device.
    pub fn sync(&self) {
        self.device.sync().expect("the device works");
    }

    /// Uninitialised memory, as Burn lays it out.
    pub fn empty(&self, shape: impl Into<burn::tensor::Shape>, dtype: DType) -> CubeTensor {
        let DispatchDevice::Cube(device) = self.device.as_dispatch().clone();
        empty_device_dtype(self.client.clone(), device, shape.into(), dtype)
    }

    /// Numbers between -0.5 and 0.5 that were made on the device.
    pub fn random<const D: usize>(&self, shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::<D>::random(shape, Distribution::Uniform(-0.5, 0.5), &self.device).cast(dtype)
    }

    /// Numbers between -0.5 and 0.5, the same in each run, with their values as stored.
    pub fn known<const D: usize>(
        &self,
        shape: [usize; D],
        dtype: DType,
        seed: u32,
    ) -> (Tensor<D>, Vec<f64>) {
        let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
        let values: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|_| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let value = (x >> 8) as f32 / 16_777_216.0 - 0.5;
                if dtype == DType::BF16 {
                    half::bf16::from_f32(value).to_f32()
                } else {
                    value
                }
            })
            .collect();
        let exact = values.iter().map(|&v| f64::from(v)).collect();
        (
            Tensor::<D>::from_data(TensorData::new(values, shape), &self.device).cast(dtype),
            exact,
        )
    }

    /// Milliseconds of `repeats` calls of `work`, each; after `warm` calls that do not count.
    pub fn ms(&self, warm: usize, repeats: usize, mut work: impl FnMut()) -> f64 {
        (0..warm).for_each(|_| work());
        self.sync();
        let begin = Instant::now();
        (0..repeats).for_each(|_| work());
        self.sync();
        begin.elapsed().as_secs_f64() * 1e3 / repeats as f64
    }
}

/// CubeCL's tensor below Burn's; the same memory.
pub fn cube<const D: usize>(tensor: &Tensor<D>) -> CubeTensor {
    tensor
        .clone()
        .try_into_primitive::<Cube>()
        .expect("a tensor of CubeCL, without fusion")
}

/// Burn's tensor over CubeCL's; the same memory.
pub fn burn<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor)
}

/// The numbers of a tensor on the host.
pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor
        .cast(DType::F32)
        .into_data()
        .try_to_vec::<f32>()
        .expect("f32")
}

/// A count that was made on the device.
pub fn count(tensor: Tensor<1, Int>) -> i64 {
    tensor.into_data().iter::<i64>().next().expect("one number")
}

/// One if any number differs, else nothing; on the device.
///
/// Not `(a - b).abs().max()`: without autotuning Burn's `max` over a whole tensor is a loop in one thread of the device,
/// which took about 14 ns a number. Its sum is a kernel of many threads.
pub fn differs(a: Tensor<1>, b: Tensor<1>) -> Tensor<1, Int> {
    a.not_equal(b).int().sum().clamp_max(1)
}

/// Says on stderr what is next and when, so that a section that hangs says where.
pub fn step(what: impl fmt::Display) {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    let at = BEGIN.get_or_init(Instant::now).elapsed();
    eprintln!("[{:8.3} s] {what}", at.as_secs_f64());
}

/// Runs `rounds` of 1, 10, 100 and so on up to `most`. `rounds` gives back how long all of them took. Stops where the next
/// would take more than ten seconds.
pub fn growing(
    name: &str,
    most: usize,
    mut rounds: impl FnMut(usize) -> Result<Duration, Box<dyn std::error::Error>>,
) -> Outcome {
    let mut count = 1;
    loop {
        step(format_args!("{name}: {count} rounds"));
        let took = rounds(count)?;
        let each = took.as_secs_f64() / count as f64;
        step(format_args!("{name}: {:.1} us a round", each * 1e6));
        if count >= most {
            return Ok(());
        }
        // The first round alone compiles kernels.
        let known = count > 1;
        count = (count * 10).min(most);
        if known && each * count as f64 > 10.0 {
            return Err(format!("{name}: {count} rounds would take too long").into());
        }
    }
}

/// Norm of the difference over the norm of the reference. A value that is no number gives infinity.
pub fn relative(got: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(got.len(), reference.len(), "as many numbers");
    let (mut off, mut all) = (0f64, 0f64);
    for (&g, &r) in got.iter().zip(reference) {
        off += (f64::from(g) - r).powi(2);
        all += r * r;
    }
    let value = (off / all).sqrt();
    if value.is_nan() { f64::INFINITY } else { value }
}

/// Runs one part of a section. Its failure is a line of its own and does not stop the others.
pub fn part(name: &str, work: impl FnOnce() -> Outcome) {
    step(name);
    let begin = Instant::now();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => println!("   {name}: {:.1} s", begin.elapsed().as_secs_f64()),
        Ok(Err(error)) => println!("RESULT {name} FAILED: {error}"),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or(panic.downcast_ref::<&str>().copied());
            println!("RESULT {name} PANICKED: {}", text.unwrap_or("no message"));
        }
    }
}

/// The middle one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
