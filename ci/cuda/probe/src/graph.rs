//! Section 6: CUDA graphs of Burn's operations together with products by the route.
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use cubecl::bytes::Bytes;

use crate::lab::{Lab, Outcome, cube, part, read, relative};
use crate::lt::{Epilogue, Kind};
use crate::products::Products;
use crate::route::because;

const SIZE: usize = 256;

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("graph.burn_only", || by_burn(lab, None));
    let products = Products::open(lab)?;
    part("graph.with_products", || by_burn(lab, Some(&products)));
    part("graph.by_client", || by_client(lab, &products));
    part("graph.long", || long(lab, &products));
    Ok(())
}

/// Burn's own function: it falls back without a word when the capture is refused, so ask.
fn by_burn(lab: &Lab, products: Option<&Products<'_>>) -> Outcome {
    let (x, _) = lab.known([SIZE, SIZE], DType::F32, 1);
    let (w, weights) = lab.known([SIZE, SIZE], DType::F32, 2);
    let mut graph = burn::tensor::capture(&lab.device, || {
        let y = x.clone() * 2.0 + 1.0;
        let y = match products {
            Some(products) => products
                .product(&y, &w, Kind::F32, None, Epilogue::None)
                .expect("planned"),
            None => y,
        };
        y.clone() * y + 3.0
    });
    let hardware = graph.is_hardware();
    let mut worst = 0f64;
    for seed in 10..15u32 {
        let (_, values) = lab.known([1], DType::F32, seed);
        let (bytes, fresh) = numbers(values[0]);
        lab.client.write(&cube(&x).handle, bytes);
        // SAFETY: the tensors that the closure reads live until the end of this function; one thread does everything.
        let out = unsafe { graph.replay() }.clone();
        let got = read(out * 1.0);
        worst = worst.max(relative(
            &got,
            &expected(&fresh, products.map(|_| &weights[..])),
        ));
    }
    println!(
        "RESULT graph by Burn's capture, product {}: hardware {hardware}, worst relative error over 5 inputs {worst:.2e}",
        products.is_some()
    );
    Ok(())
}

fn numbers(seed: f64) -> (Bytes, Vec<f64>) {
    let values: Vec<f32> = (0..SIZE * SIZE)
        .map(|i| ((i * 7919 % 1013) as f32 / 1013.0 - 0.5) * (1.0 + seed as f32))
        .collect();
    let exact = values.iter().map(|&v| f64::from(v)).collect();
    (
        Bytes::from_bytes_vec(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        exact,
    )
}

fn expected(x: &[f64], weights: Option<&[f64]>) -> Vec<f64> {
    let y: Vec<f64> = x.iter().map(|v| v * 2.0 + 1.0).collect();
    let y = match weights {
        None => y,
        Some(w) => (0..SIZE * SIZE)
            .map(|i| {
                (0..SIZE)
                    .map(|k| y[i / SIZE * SIZE + k] * w[k * SIZE + i % SIZE])
                    .sum()
            })
            .collect(),
    };
    y.iter().map(|v| v * v + 3.0).collect()
}

/// The client's own functions, which say why a capture is refused.
fn by_client(lab: &Lab, products: &Products<'_>) -> Outcome {
    let (x, _) = lab.known([SIZE, SIZE], DType::F32, 1);
    let (w, weights) = lab.known([SIZE, SIZE], DType::F32, 2);
    let step = || {
        let y = products
            .product(
                &(x.clone() * 2.0 + 1.0),
                &w,
                Kind::F32,
                None,
                Epilogue::None,
            )
            .expect("planned");
        y.clone() * y + 3.0
    };
    lab.client
        .graph_prepare()
        .map_err(|e| because("graph_prepare", e))?;
    for _ in 0..3 {
        let out = step();
        lab.sync();
        drop(out);
    }
    lab.client
        .start_capture()
        .map_err(|e| because("start_capture", e))?;
    let out = step();
    let graph = lab
        .client
        .stop_capture()
        .map_err(|e| because("stop_capture", e))?;
    let mut worst = 0f64;
    for seed in 0..5 {
        let (bytes, fresh) = numbers(f64::from(seed) / 5.0);
        lab.client.write(&cube(&x).handle, bytes);
        // SAFETY: every tensor that the step reads or writes lives until the end of this function.
        unsafe { graph.replay() }.map_err(|e| because("replay", e))?;
        worst = worst.max(relative(
            &read(out.clone() * 1.0),
            &expected(&fresh, Some(&weights)),
        ));
    }
    println!(
        "RESULT graph by the client, with a product: worst relative error over 5 inputs {worst:.2e}"
    );
    Ok(())
}

/// A chain of 400 operations: launched, and as a graph.
fn long(lab: &Lab, products: &Products<'_>) -> Outcome {
    let x = lab.random([SIZE, SIZE], DType::BF16);
    let w = lab.random([SIZE, SIZE], DType::BF16);
    let mut step = || {
        (0..100).fold(x.clone(), |y: Tensor<2>, _| {
            let y = products
                .product(&(y * 0.5 + 0.25), &w, Kind::Bf16, None, Epilogue::None)
                .expect("planned");
            y + x.clone()
        })
    };
    let launched = lab.ms(3, 10, || drop(step()));
    let begin = Instant::now();
    let mut graph = burn::tensor::capture(&lab.device, &mut step);
    let captured = begin.elapsed().as_secs_f64() * 1e3;
    let hardware = graph.is_hardware();
    // SAFETY: `x` and `w` live until the end of this function.
    let replayed = lab.ms(3, 10, || drop(unsafe { graph.replay() }.clone()));
    println!(
        "RESULT graph of 400 operations: hardware {hardware}, launched {launched:.3} ms, replayed {replayed:.3} ms, captured in {captured:.0} ms"
    );
    Ok(())
}
