//! A decoder of event files that shares no code with the encoder. The tests of the command also use it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The values of each tag by step, as TensorBoard shows them.
pub(crate) type Scalars = BTreeMap<String, BTreeMap<u64, f32>>;

/// An event: its time, its step and its contents.
#[derive(Debug, PartialEq)]
pub(crate) struct Event {
    pub(crate) wall_time: f64,
    pub(crate) step: u64,
    pub(crate) what: What,
}

/// The contents of an event.
#[derive(Debug, PartialEq)]
pub(crate) enum What {
    Version(String),
    Start,
    Scalars(Vec<(String, f32)>),
}

/// Returns the event files of a folder in the order in which TensorBoard reads them.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("it is listed").path())
        .collect();
    files.sort();
    files
}

/// Returns the scalars of a folder. A start removes the values of its step and of later steps, as in TensorBoard.
pub(crate) fn scalars(folder: &Path) -> Scalars {
    let mut all = Scalars::new();
    for file in files(folder) {
        for event in events(&std::fs::read(file).expect("it is read")) {
            match event.what {
                What::Version(_) => {}
                What::Start => {
                    for values in all.values_mut() {
                        values.retain(|step, _| *step < event.step);
                    }
                }
                What::Scalars(values) => {
                    for (tag, value) in values {
                        all.entry(tag).or_default().insert(event.step, value);
                    }
                }
            }
        }
    }
    all
}

/// Returns the events of a file.
pub(crate) fn events(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let length = take::<8>(&mut bytes);
        let checksum = u32::from_le_bytes(take(&mut bytes));
        assert_eq!(checksum, masked(&length), "the checksum of a length");
        let (data, rest) = bytes.split_at(u64::from_le_bytes(length) as usize);
        bytes = rest;
        let checksum = u32::from_le_bytes(take(&mut bytes));
        assert_eq!(checksum, masked(data), "the checksum of an event");
        events.push(event(data));
    }
    events
}

fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (taken, rest) = bytes.split_first_chunk().expect("a whole record");
    *bytes = rest;
    *taken
}

/// CRC-32C, bit by bit, and masked.
fn masked(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn event(data: &[u8]) -> Event {
    let (mut wall_time, mut step, mut what) = (None, None, None);
    for (field, value) in fields(data) {
        match (field, value) {
            (1, Value::Double(time)) => wall_time = Some(time),
            (2, Value::Number(number)) => step = Some(number),
            (3, Value::Bytes(bytes)) => what = Some(What::Version(text(bytes))),
            (5, Value::Bytes(bytes)) => {
                let values = fields(bytes).into_iter().map(|(field, value)| {
                    let Value::Bytes(bytes) = value else {
                        panic!("field {field} of a summary is {value:?}")
                    };
                    scalar(bytes)
                });
                what = Some(What::Scalars(values.collect()));
            }
            (7, Value::Bytes(bytes)) => {
                assert_eq!(fields(bytes), [(1, Value::Number(1))]);
                what = Some(What::Start);
            }
            other => panic!("an event has {other:?}"),
        }
    }
    Event {
        wall_time: wall_time.expect("a time"),
        step: step.expect("a step"),
        what: what.expect("something"),
    }
}

fn scalar(data: &[u8]) -> (String, f32) {
    match fields(data)[..] {
        [(1, Value::Bytes(tag)), (2, Value::Float(value))] => (text(tag), value),
        ref other => panic!("a value is {other:?}"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Value<'a> {
    Number(u64),
    Double(f64),
    Bytes(&'a [u8]),
    Float(f32),
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Value<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Value::Number(varint(&mut bytes)),
            1 => Value::Double(f64::from_le_bytes(take(&mut bytes))),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (taken, rest) = bytes.split_at(length);
                bytes = rest;
                Value::Bytes(taken)
            }
            5 => Value::Float(f32::from_le_bytes(take(&mut bytes))),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for group in 0.. {
        let [byte] = take::<1>(bytes);
        value |= u64::from(byte & 0x7f) << (7 * group);
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}
