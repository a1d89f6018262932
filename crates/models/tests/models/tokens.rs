use burn::tensor::Device;
use burn_fsdp_models::{Batches, TokenRange, TokenStream};

fn bytes(len: u8) -> TokenStream {
    let bytes: Vec<u8> = (0..len).collect();
    TokenStream::Text(TokenRange::of_bytes(bytes.into(), 0..len.into()).unwrap())
}

#[test]
fn synthetic_tokens_are_multiples_of_the_stride() {
    let batches = Batches {
        stream: TokenStream::Synthetic { vocab: 4096 },
        batch: 8,
        seq: 256,
    };
    // Row 5 of step 3, as the PyTorch program computes it.
    let rows = batches.rows(3, 5..6);
    let start = (3 * 8 + 5) * 256;
    for index in 0..256 {
        assert_eq!(rows.inputs()[index], ((start + index) * 7919 % 4096) as i64);
        assert_eq!(
            rows.targets()[index],
            ((start + index + 1) * 7919 % 4096) as i64
        );
    }
}

#[test]
fn synthetic_tokens_of_a_huge_position_do_not_overflow() {
    let stream = TokenStream::Synthetic { vocab: 4096 };
    assert!((0..4096).contains(&stream.token(usize::MAX)));
}

#[test]
fn targets_are_shifted_by_one_token() {
    let batches = Batches {
        stream: bytes(100),
        batch: 2,
        seq: 4,
    };
    let rows = batches.rows(1, 0..2);
    assert_eq!(rows.inputs(), [8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!(rows.targets(), [9, 10, 11, 12, 13, 14, 15, 16]);
}

#[test]
fn the_rows_of_all_ranks_are_the_batch() {
    let batches = Batches {
        stream: bytes(100),
        batch: 6,
        seq: 3,
    };
    let whole = batches.rows(2, 0..6);
    let parts: Vec<_> = (0..3)
        .map(|rank| batches.rows(2, rank * 2..rank * 2 + 2))
        .collect();
    let joined: Vec<i64> = parts
        .iter()
        .flat_map(|part| part.inputs().to_vec())
        .collect();
    assert_eq!(whole.inputs(), joined);
}

#[test]
fn a_short_text_starts_again() {
    let batches = Batches {
        stream: bytes(5),
        batch: 1,
        seq: 4,
    };
    assert_eq!(batches.rows(1, 0..1).inputs(), [4, 0, 1, 2]);
    assert_eq!(batches.rows(1, 0..1).targets(), [0, 1, 2, 3]);
    assert_eq!(batches.rows(0, 0..1).targets(), [1, 2, 3, 4]);
}

#[test]
fn whole_rows_and_the_rest_have_each_target_once() {
    for (len, whole) in [(16, 3), (17, 4), (3, 0), (2, 0), (1, 0), (100, 24)] {
        let batches = Batches {
            stream: bytes(len),
            batch: 2,
            seq: 4,
        };
        assert_eq!(batches.num_whole_rows(), Some(whole), "{len}");
        let rows = (0..whole).map(|row| batches.rows(0, row..row + 1));
        let all = rows.chain(batches.rest());
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for rows in all {
            inputs.extend(rows.inputs().to_vec());
            targets.extend(rows.targets().to_vec());
        }
        assert_eq!(inputs, (0..i64::from(len) - 1).collect::<Vec<_>>());
        assert_eq!(targets, (1..i64::from(len)).collect::<Vec<_>>());
    }
}

#[test]
fn rows_become_tensors_of_their_shape() {
    let batches = Batches {
        stream: bytes(100),
        batch: 2,
        seq: 4,
    };
    let (inputs, targets) = batches.rows(0, 0..2).to_tensors(&Device::flex());
    assert_eq!(inputs.dims(), [2, 4]);
    assert_eq!(targets.dims(), [2, 4]);
}

#[test]
fn windows_are_drawn_by_seed_and_row() {
    let TokenStream::Text(range) = bytes(200) else {
        unreachable!("they are bytes")
    };
    let windows = |seed| Batches {
        stream: TokenStream::Windows {
            tokens: range.clone(),
            seed,
        },
        batch: 4,
        seq: 16,
    };
    let all = windows(1).rows(7, 0..4);
    // Each row is a window, and its targets are one token further.
    for (inputs, targets) in all.inputs().chunks(16).zip(all.targets().chunks(16)) {
        let window: Vec<i64> = (inputs[0]..inputs[0] + 16).collect();
        assert_eq!(inputs, window);
        assert_eq!(&targets[..15], &window[1..]);
        assert_eq!(targets[15], inputs[0] + 16);
    }
    // Every worker draws the same rows, and another step or seed draws others.
    let halves = [windows(1).rows(7, 0..2), windows(1).rows(7, 2..4)];
    let inputs: Vec<i64> = halves
        .iter()
        .flat_map(|rows| rows.inputs().to_vec())
        .collect();
    assert_eq!(inputs, all.inputs());
    assert_ne!(windows(1).rows(8, 0..4), all);
    assert_ne!(windows(2).rows(7, 0..4), all);
    // They are spread over the whole text, including its end.
    let starts: Vec<i64> = (0..100)
        .map(|step| windows(3).rows(step, 0..1).inputs()[0])
        .collect();
    assert!(starts.iter().any(|start| *start < 20) && starts.iter().any(|start| *start > 160));
    assert!(starts.iter().all(|start| *start <= 183));
}

#[test]
fn a_window_longer_than_the_text_begins_again() {
    let TokenStream::Text(range) = bytes(5) else {
        unreachable!("they are bytes")
    };
    let stream = TokenStream::Windows {
        tokens: range,
        seed: 1,
    };
    let batches = Batches {
        stream,
        batch: 1,
        seq: 7,
    };
    assert_eq!(batches.rows(3, 0..1).inputs(), [0, 1, 2, 3, 4, 0, 1]);
}
