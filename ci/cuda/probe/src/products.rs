//! Section 1: products of cuBLASLt on CubeCL's stream and pointers.
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use crate::lab::{Lab, Outcome, burn, cube, part, read, relative};
use crate::lt::{Epilogue, Kind, Lt, Pointers, Shape, WORKSPACE};
use crate::route::{Resolved, RouteError};

/// cuBLASLt with its scratch memory on this thread's stream.
pub struct Products<'a> {
    lab: &'a Lab,
    lt: Arc<Lt>,
    workspace: CubeTensor,
}

impl<'a> Products<'a> {
    /// Loads the library; takes the workspace from CubeCL.
    pub fn open(lab: &'a Lab) -> Result<Self, RouteError> {
        let workspace = lab.empty([WORKSPACE], DType::U8);
        Ok(Self {
            lab,
            lt: Arc::new(Lt::new()?),
            workspace,
        })
    }

    /// The product of two matrices, or of two stacks of them, on this thread's stream. Nothing is waited for.
    pub fn product<const D: usize>(
        &self,
        left: &Tensor<D>,
        right: &Tensor<D>,
        kind: Kind,
        bias: Option<&Tensor<1>>,
        epilogue: Epilogue,
    ) -> Result<Tensor<D>, RouteError> {
        let (left, right, bias) = (cube(left), cube(right), bias.map(cube));
        let mut dims = left.meta.shape().to_vec();
        dims[D - 1] = right.meta.shape()[D - 1];
        let out = self.lab.empty(dims, left.dtype);
        let plan = self
            .lt
            .plan(shape_of(&left, &right, &out, kind, epilogue))?;
        let lt = self.lt.clone();
        let mut reads = vec![&left, &right];
        reads.extend(&bias);
        self.lab
            .route
            .enqueue(&reads, &[&out, &self.workspace], move |at| {
                call(&lt, &plan, at)
            });
        Ok(burn(out))
    }
}

/// One product, on the server's thread.
fn call(lt: &Lt, plan: &crate::lt::Plan, at: &Resolved<'_>) -> Result<(), RouteError> {
    let pointers = Pointers {
        left: at.reads[0],
        right: at.reads[1],
        out: at.writes[0],
        workspace: at.writes[1],
        bias: at.reads.get(2).copied(),
    };
    // SAFETY: the route resolved the pointers for this stream, and the plan was made from the same shapes. Only the
    // server's thread comes here.
    unsafe { lt.enqueue(plan, &pointers, at.stream.cast()) }
}

fn shape_of(
    left: &CubeTensor,
    right: &CubeTensor,
    out: &CubeTensor,
    kind: Kind,
    epilogue: Epilogue,
) -> Shape {
    let rank = left.meta.shape().len();
    // Whether the rows lie apart (not turned) or the columns do, and how far.
    let lie = |tensor: &CubeTensor| {
        let (rows, columns) = (
            tensor.meta.strides()[rank - 2],
            tensor.meta.strides()[rank - 1],
        );
        assert!(
            rows == 1 || columns == 1,
            "one of the two last dimensions is dense"
        );
        if columns == 1 {
            (false, rows as i64)
        } else {
            (true, columns as i64)
        }
    };
    let (turned_left, step_left) = lie(left);
    let (turned_right, step_right) = lie(right);
    let batch = (rank == 3).then(|| {
        let between = |tensor: &CubeTensor| tensor.meta.strides()[0] as i64;
        (
            left.meta.shape()[0] as i32,
            (between(left), between(right), between(out)),
        )
    });
    Shape {
        mkn: (
            left.meta.shape()[rank - 2] as u64,
            left.meta.shape()[rank - 1] as u64,
            right.meta.shape()[rank - 1] as u64,
        ),
        turned: (turned_left, turned_right),
        steps: (step_left, step_right, lie(out).1),
        batch,
        kind,
        epilogue,
    }
}

fn stored(kind: Kind) -> DType {
    if kind == Kind::Bf16 {
        DType::BF16
    } else {
        DType::F32
    }
}

const KINDS: [Kind; 3] = [Kind::Bf16, Kind::Tf32, Kind::F32];

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    let products = Products::open(lab)?;
    println!("RESULT products cublaslt_version {}", products.lt.version());
    part("products.right", || right(&products));
    part("products.batched", || batched(&products));
    part("products.gelu", || gelu(&products));
    part("products.failure_is_carried", || {
        failure_is_carried(&products)
    });
    part("products.host_cost", || host_cost(&products));
    part("products.rates", || rates(&products));
    part("products.burn_rates", || burn_rates(lab));
    Ok(())
}

fn host_product(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let mut out = vec![0f64; m * n];
    for i in 0..m {
        for p in 0..k {
            let x = a[i * k + p];
            for j in 0..n {
                out[i * n + j] += x * b[p * n + j];
            }
        }
    }
    out
}

fn turn(values: &[f64], (rows, columns): (usize, usize)) -> Vec<f64> {
    (0..columns * rows)
        .map(|i| values[(i % rows) * columns + i / rows])
        .collect()
}

/// Against 64 bits on the host: each kind, both matrices turned or not, sizes that are no multiples of anything.
fn right(products: &Products<'_>) -> Outcome {
    for sizes in [(256usize, 384usize, 512usize), (257, 333, 129)] {
        let (m, k, n) = sizes;
        for kind in KINDS {
            let mut worst = 0f64;
            for (turn_left, turn_right) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let (a, av) = if turn_left {
                    products.lab.known([k, m], stored(kind), 1)
                } else {
                    products.lab.known([m, k], stored(kind), 1)
                };
                let (b, bv) = if turn_right {
                    products.lab.known([n, k], stored(kind), 2)
                } else {
                    products.lab.known([k, n], stored(kind), 2)
                };
                let (a, av) = if turn_left {
                    (a.transpose(), turn(&av, (k, m)))
                } else {
                    (a, av)
                };
                let (b, bv) = if turn_right {
                    (b.transpose(), turn(&bv, (n, k)))
                } else {
                    (b, bv)
                };
                let out = products.product(&a, &b, kind, None, Epilogue::None)?;
                worst = worst.max(relative(&read(out), &host_product(&av, &bv, sizes)));
            }
            println!(
                "RESULT products right {kind:?} {m}x{k}x{n} plain and turned, worst relative error {worst:.2e}"
            );
        }
    }
    Ok(())
}

fn batched(products: &Products<'_>) -> Outcome {
    let (count, m, k, n) = (6usize, 96usize, 64usize, 80usize);
    for kind in KINDS {
        let (a, av) = products.lab.known([count, m, k], stored(kind), 3);
        let (b, bv) = products.lab.known([count, k, n], stored(kind), 4);
        let got = read(products.product(&a, &b, kind, None, Epilogue::None)?);
        let reference: Vec<f64> = (0..count)
            .flat_map(|i| {
                host_product(
                    &av[i * m * k..][..m * k],
                    &bv[i * k * n..][..k * n],
                    (m, k, n),
                )
            })
            .collect();
        println!(
            "RESULT products batched {kind:?} relative error {:.2e}",
            relative(&got, &reference)
        );
    }
    for (m, k, n) in [(1024usize, 64usize, 1024usize), (1024, 1024, 64)] {
        for kind in [Kind::Bf16, Kind::Tf32] {
            let (a, b) = (
                products.lab.random([96, m, k], stored(kind)),
                products.lab.random([96, k, n], stored(kind)),
            );
            let ms = products.lab.ms(3, 20, || {
                drop(
                    products
                        .product(&a, &b, kind, None, Epilogue::None)
                        .expect("a product"),
                )
            });
            println!(
                "RESULT products batched {kind:?} 96x{m}x{k}x{n} {:.1} TFLOP/s",
                2.0 * 96.0 * (m * k * n) as f64 / ms / 1e9
            );
        }
    }
    Ok(())
}

/// Which GELU is the epilogue?
fn gelu(products: &Products<'_>) -> Outcome {
    let (m, k, n) = (256usize, 64usize, 512usize);
    for kind in KINDS {
        let (a, av) = products.lab.known([m, k], stored(kind), 5);
        let (b, bv) = products.lab.known([k, n], stored(kind), 6);
        let (bias, cv) = products.lab.known([n], stored(kind), 7);
        let plain: Vec<f64> = host_product(&av, &bv, (m, k, n))
            .iter()
            .enumerate()
            .map(|(i, x)| x + cv[i % n])
            .collect();
        let with_bias = read(products.product(&a, &b, kind, Some(&bias), Epilogue::Bias)?);
        let with_gelu = read(products.product(&a, &b, kind, Some(&bias), Epilogue::BiasGelu)?);
        let exact: Vec<f64> = plain
            .iter()
            .map(|&x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt())))
            .collect();
        let tanh: Vec<f64> = plain
            .iter()
            .map(|&x| {
                0.5 * x
                    * (1.0
                        + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3)))
                            .tanh())
            })
            .collect();
        println!(
            "RESULT products gelu {kind:?} bias {:.2e}; gelu against the exact form {:.2e}, against tanh's {:.2e} (the two differ by {:.2e})",
            relative(&with_bias, &plain),
            relative(&with_gelu, &exact),
            relative(&with_gelu, &tanh),
            relative(&tanh.iter().map(|&x| x as f32).collect::<Vec<_>>(), &exact)
        );
    }
    Ok(())
}

/// The error function by its series; right to 1e-12 between -4 and 4.
fn erf(x: f64) -> f64 {
    let (mut sum, mut term) = (x, x);
    for i in 1..100 {
        term *= -x * x / f64::from(i);
        sum += term / f64::from(2 * i + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// An error in a closure must show when the output is read, and not poison the device.
fn failure_is_carried(products: &Products<'_>) -> Outcome {
    let out = products.lab.empty([16], DType::F32);
    let source = products.lab.random([16], DType::F32);
    products.lab.route.enqueue(&[&cube(&source)], &[&out], |_| {
        Err(crate::route::because("on purpose", "refused"))
    });
    let told = burn::<1>(out.clone()).try_into_data().map_or_else(
        |e| {
            format!(
                "an error: {}",
                format!("{e:?}").chars().take(120).collect::<String>()
            )
        },
        |_| "NOTHING".into(),
    );
    // A write over it heals it.
    products
        .lab
        .route
        .enqueue(&[&cube(&source)], &[&out], |at| {
            // SAFETY: both have 64 bytes.
            unsafe { crate::route::copy(at.writes[0], at.reads[0], 64, at.stream) }
        });
    let healed = burn::<1>(out).try_into_data().is_ok_and(|data| {
        data.try_to_vec::<f32>().ok() == source.clone().into_data().try_to_vec::<f32>().ok()
    });
    let after = read(source * 0.0 + 3.0);
    println!(
        "RESULT products a refused closure shows as {told:?}; a later write heals it: {healed}; the device works after it: {}",
        after.iter().all(|&v| v == 3.0)
    );
    Ok(())
}

/// Microseconds of the host for a call, and of the device, over 1,000 small products.
fn host_cost(products: &Products<'_>) -> Outcome {
    const CALLS: usize = 1000;
    let lab = products.lab;
    let (a, b) = (
        lab.random([256, 256], DType::BF16),
        lab.random([256, 256], DType::BF16),
    );
    let (left, right) = (cube(&a), cube(&b));
    let tell = |name: &str, work: &mut dyn FnMut()| {
        work();
        lab.sync();
        let begin = Instant::now();
        work();
        let host = begin.elapsed();
        lab.sync();
        let all = begin.elapsed();
        let each = |d: std::time::Duration| d.as_secs_f64() * 1e6 / CALLS as f64;
        println!(
            "RESULT products host_cost {name}: {:.2} us a call on the caller, {:.2} us until the device is done",
            each(host),
            each(all)
        );
    };
    tell("route, one submit a product", &mut || {
        (0..CALLS).for_each(|_| drop(products.product(&a, &b, Kind::Bf16, None, Epilogue::None)))
    });
    let out = lab.empty([256, 256], DType::BF16);
    let shape = shape_of(&left, &right, &out, Kind::Bf16, Epilogue::None);
    tell("route, one submit for all, pointers once", &mut || {
        let plan = products.lt.plan(shape).expect("planned before");
        let lt = products.lt.clone();
        products
            .lab
            .route
            .enqueue(&[&left, &right], &[&out, &products.workspace], move |at| {
                (0..CALLS).try_for_each(|_| call(&lt, &plan, at))
            });
    });
    tell("route, waiting for each submit", &mut || {
        (0..CALLS).for_each(|_| {
            let plan = products.lt.plan(shape).expect("planned before");
            lab.route
                .enqueue_now(&[&left, &right], &[&out, &products.workspace], |at| {
                    call(&products.lt, &plan, at)
                })
                .expect("a product");
        });
    });
    tell("an empty closure", &mut || {
        (0..CALLS).for_each(|_| lab.route.enqueue(&[], &[&out], |_| Ok(())))
    });
    tell("Burn's own addition", &mut || {
        (0..CALLS).for_each(|_| drop(a.clone() + b.clone()))
    });
    tell("Burn's own matmul", &mut || {
        (0..CALLS).for_each(|_| drop(a.clone().matmul(b.clone())))
    });
    Ok(())
}

const SIZES: [(usize, usize, usize); 6] = [
    (8192, 768, 3072),
    (8192, 3072, 768),
    (768, 8192, 3072),
    (8192, 768, 32768),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
];

fn rates(products: &Products<'_>) -> Outcome {
    let lab = products.lab;
    for (m, k, n) in SIZES {
        for kind in KINDS {
            let (a, b) = (
                lab.random([m, k], stored(kind)),
                lab.random([k, n], stored(kind)),
            );
            let flops = 2.0 * (m * k * n) as f64;
            // About 60 ms each, by the rates that are to be expected.
            let repeats = ((0.06 * if kind == Kind::F32 { 4e13 } else { 4e14 } / flops) as usize)
                .clamp(5, 200);
            let rate = |a: &Tensor<2>, b: &Tensor<2>| {
                flops
                    / lab.ms(3, repeats, || {
                        drop(
                            products
                                .product(a, b, kind, None, Epilogue::None)
                                .expect("a product"),
                        )
                    })
                    / 1e9
            };
            let plain = rate(&a, &b);
            // As the two products of a backward pass want them: the right one turned, the left one turned.
            let (bt, at) = (
                lab.random([n, k], stored(kind)).transpose(),
                lab.random([k, m], stored(kind)).transpose(),
            );
            let (right, left) = (rate(&a, &bt), rate(&at, &b));
            println!(
                "RESULT products rate {kind:?} {m}x{k}x{n} {plain:.0} TFLOP/s, right turned {right:.0}, left turned {left:.0}"
            );
        }
    }
    Ok(())
}

fn burn_rates(lab: &Lab) -> Outcome {
    let begin = Instant::now();
    for (m, k, n) in &SIZES[..5] {
        for dtype in [DType::BF16, DType::F32] {
            if begin.elapsed().as_secs() > 25 {
                println!("RESULT products burn_rate stopped after 25 s");
                return Ok(());
            }
            let (a, b) = (lab.random([*m, *k], dtype), lab.random([*k, *n], dtype));
            let ms = lab.ms(2, 4, || drop(a.clone().matmul(b.clone())));
            println!(
                "RESULT products burn_rate {dtype:?} {m}x{k}x{n} {:.0} TFLOP/s",
                2.0 * (m * k * n) as f64 / ms / 1e9
            );
        }
    }
    Ok(())
}
