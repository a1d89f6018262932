use burn::tensor::Device;
use burn_fsdp_models::{Batches, ByteRange, TokenStream};

fn bytes(len: u8) -> TokenStream {
    let bytes: Vec<u8> = (0..len).collect();
    TokenStream::Bytes(ByteRange::new(bytes.into(), 0..len.into()).unwrap())
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
fn targets_are_one_token_further() {
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
fn distinct_batches_leave_room_for_the_last_target() {
    let batches = |len| {
        Batches {
            stream: bytes(len),
            batch: 2,
            seq: 4,
        }
        .num_distinct()
    };
    assert_eq!(batches(16), Some(1));
    assert_eq!(batches(17), Some(2));
    assert_eq!(batches(3), Some(1));
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
