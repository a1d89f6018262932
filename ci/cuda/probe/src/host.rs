//! Section 5: what it costs to read back, to make zeros, and to copy between the host and the device.
use std::time::Instant;

use burn::tensor::{DType, Tensor, TensorData};
use cubecl::bytes::Bytes;
use cudarc::driver::result;

use crate::lab::{Lab, Outcome, cube, median, part, read};
use crate::route::because;

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("host.scalar", || scalar(lab));
    part("host.zeros", || zeros(lab));
    part("host.pinned", || pinned(lab));
    part("host.cubecl", || by_cubecl(lab));
    Ok(())
}

/// One number read back, with nothing queued and behind about 100 ms of work.
fn scalar(lab: &Lab) -> Outcome {
    let one = Tensor::<1>::zeros([1], &lab.device) + 1.0;
    read(one.clone());
    let idle = median((0..200).map(|_| time(|| fetch(one.clone()))).collect());
    println!(
        "RESULT host reading 4 bytes, nothing queued: {:.1} us",
        idle * 1e3
    );
    let a = lab.random([4096, 4096], DType::F32);
    let each = lab.ms(2, 5, || drop(a.clone().matmul(a.clone())));
    let count = (100.0 / each).ceil() as usize;
    let work = || (0..count).for_each(|_| drop(a.clone().matmul(a.clone())));
    let alone = lab.ms(0, 3, work);
    lab.sync();
    let begin = Instant::now();
    work();
    let queued = begin.elapsed().as_secs_f64() * 1e3;
    fetch(one.clone());
    println!(
        "RESULT host reading 4 bytes behind {alone:.1} ms of work: work queued after {queued:.2} ms, read after {:.1} ms",
        begin.elapsed().as_secs_f64() * 1e3
    );
    // The same from another thread, so by another stream: does the runner wait, or the reader only?
    lab.sync();
    let begin = Instant::now();
    work();
    let other = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let two = Tensor::<1>::zeros([1], &lab.device) + 2.0;
                fetch(two);
                begin.elapsed().as_secs_f64() * 1e3
            })
            .join()
            .expect("read")
    });
    println!("RESULT host reading 4 bytes of another stream meanwhile: after {other:.1} ms");
    lab.sync();
    Ok(())
}

/// Reads a tensor. Burn's `into_data` alone reads nothing: the copy is made when the bytes are first looked at.
fn fetch(tensor: Tensor<1>) {
    std::hint::black_box(tensor.into_data().as_bytes().last().copied());
}

fn time(work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64() * 1e3
}

fn zeros(lab: &Lab) -> Outcome {
    let size = 25 << 20;
    let ms = lab.ms(2, 10, || drop(Tensor::<1>::zeros([size], &lab.device)));
    println!(
        "RESULT host zeros of 100 MiB made on the device: {ms:.3} ms ({:.0} GB/s written)",
        4.0 * size as f64 / ms / 1e6
    );
    Ok(())
}

/// Our own pinned memory, on CubeCL's stream.
fn pinned(lab: &Lab) -> Outcome {
    let bytes = 256usize << 20;
    let device = lab.empty([bytes / 4], DType::F32);
    // SAFETY: freed below, once, after the device is done.
    let memory =
        unsafe { result::malloc_host(bytes, 0) }.map_err(|e| because("pinned memory", e))? as usize;
    let up = lab.ms(2, 10, || {
        lab.route.enqueue(&[], &[&device], move |at| {
            // SAFETY: both have `bytes`, and the memory lives until the stream was waited for.
            let host = unsafe { std::slice::from_raw_parts(memory as *const u8, bytes) };
            unsafe { result::memcpy_htod_async(at.writes[0], host, at.stream) }
                .map_err(|e| because("copy up", e))
        });
    });
    let down = lab.ms(2, 10, || {
        lab.route
            .enqueue(&[&device], &[&lab.empty([1], DType::F32)], move |at| {
                // SAFETY: as above.
                let host = unsafe { std::slice::from_raw_parts_mut(memory as *mut u8, bytes) };
                unsafe { result::memcpy_dtoh_async(host, at.reads[0], at.stream) }
                    .map_err(|e| because("copy down", e))
            });
    });
    // SAFETY: allocated above, and every copy is done.
    unsafe { result::free_host(memory as *mut _) }.map_err(|e| because("free pinned memory", e))?;
    let rate = |ms: f64| bytes as f64 / ms / 1e6;
    println!(
        "RESULT host pinned memory of our own on CubeCL's stream: {:.1} GB/s up, {:.1} down",
        rate(up),
        rate(down)
    );
    Ok(())
}

/// CubeCL's own ways.
fn by_cubecl(lab: &Lab) -> Outcome {
    let bytes = 256usize << 20;
    let rate = |ms: f64| bytes as f64 / ms / 1e6;
    let values = vec![1f32; bytes / 4];
    let tensor = Tensor::<1>::from_data(TensorData::new(values.clone(), [bytes / 4]), &lab.device);
    lab.sync();
    let down: Vec<f64> = (0..5).map(|_| time(|| fetch(tensor.clone()))).collect();
    println!(
        "RESULT host Burn's into_data of 256 MiB: first {:.1} GB/s, then {:.1}",
        rate(down[0]),
        rate(down[4])
    );
    let up: Vec<f64> = (0..5)
        .map(|_| {
            let data = TensorData::new(values.clone(), [bytes / 4]);
            time(|| {
                drop(Tensor::<1>::from_data(data, &lab.device));
                lab.sync();
            })
        })
        .collect();
    println!(
        "RESULT host Burn's from_data of 256 MiB: first {:.1} GB/s, then {:.1}",
        rate(up[0]),
        rate(up[4])
    );
    let handle = cube(&tensor).handle;
    let bytes_of = |values: &[f32]| {
        Bytes::from_bytes_vec(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    };
    let plain: Vec<f64> = (0..4)
        .map(|_| {
            let data = bytes_of(&values);
            time(|| {
                lab.client.write(&handle, data);
                lab.sync();
            })
        })
        .collect();
    println!(
        "RESULT host CubeCL's write of 256 MiB: first {:.1} GB/s, then {:.1}",
        rate(plain[0]),
        rate(plain[3])
    );
    let staged: Vec<(f64, f64)> = (0..4)
        .map(|_| {
            let mut data = bytes_of(&values);
            let staging = time(|| lab.client.staging(std::iter::once(&mut data), false));
            (
                staging,
                time(|| {
                    lab.client.write(&handle, data);
                    lab.sync();
                }),
            )
        })
        .collect();
    println!(
        "RESULT host CubeCL's write of 256 MiB from its staging: {:.1} GB/s to stage, {:.1} GB/s to write",
        rate(staged[3].0),
        rate(staged[3].1)
    );
    Ok(())
}
