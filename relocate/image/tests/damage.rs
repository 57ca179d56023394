//! An image gives what was written, or is refused with the place of the damage.

use mercury_image::{
    Chunk, Error, Frame, Identity, Kind, MAGIC, Machine, PAGE, Range, Reader, Source, Writer, verify,
};
use proptest::prelude::*;

const IDENTITY: Identity = Identity([7; 16]);

fn machine() -> Machine {
    let range = Range { start_phys: 0x1000, pages: 1000, kind: Kind::Kept };
    Machine { host: "node7".into(), ranges: vec![range], ..Machine::default() }
}

/// Returns pages of several kinds: zeros, text, noise, twins.
fn chunks() -> Vec<Chunk> {
    let mut noise = 1_u64;
    let mut page = |kind: usize| -> Vec<u8> {
        (0..PAGE)
            .map(|at| match kind {
                0 => b"the quick brown fox "[at % 20],
                _ => {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (noise >> 56) as u8
                }
            })
            .collect()
    };
    let mut chunks = Vec::new();
    for number in 0..4_u64 {
        let mut chunk = Chunk::default();
        for index in 0..25_u64 {
            let phys = 0x1000 * (1 + number * 25 + index);
            let source = match index % 4 {
                0 => Source::Zero,
                1 if number > 0 => Source::Frame(0x3000),
                _ => Source::Data,
            };
            if source == Source::Data {
                chunk.data.extend(page(index as usize % 3));
            }
            chunk.frames.push(Frame { phys, source });
        }
        chunks.push(chunk);
    }
    chunks
}

fn image() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::begin(&mut bytes, IDENTITY, &machine()).expect("begun");
    for chunk in chunks() {
        writer.add(&chunk.compress(1).expect("compressed")).expect("added");
    }
    let (commit, length) = writer.commit().expect("committed");
    assert_eq!((commit.frames, length), (100, bytes.len() as u64));
    bytes
}

#[test]
fn reading_returns_the_written_frames() {
    let bytes = image();
    let mut reader = Reader::open(&bytes[..]).expect("an image");
    assert_eq!(*reader.machine(), machine());
    let mut found = Vec::new();
    while let Some(chunk) = reader.next_chunk().expect("a chunk") {
        found.push(chunk);
    }
    assert_eq!(found, chunks());
    assert_eq!(reader.commit().expect("the end").zeros, 28);
    assert_eq!(reader.identity(), IDENTITY);
    // Bytes that a block device has after the image do not matter.
    let longer = [&bytes[..], &[1; 100]].concat();
    assert!(verify(&longer[..], |_| {}).is_ok());
}

#[test]
fn every_truncation_is_refused() {
    let bytes = image();
    for length in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        let error = verify(&bytes[..length], |_| {}).expect_err("refused");
        let named = match error {
            Error::NotAnImage => length < MAGIC.len() + 4,
            Error::Torn(place) => place.offset <= length as u64,
            _ => false,
        };
        assert!(named, "{length}: {error}");
    }
}

/// Ten thousand flips of one bit, spread over the whole image, are each refused.
#[test]
fn every_flipped_bit_is_refused() {
    let mut bytes = image();
    let bits = bytes.len() * 8;
    for number in 0..10_000_usize {
        let bit = number * bits / 10_000;
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(verify(&bytes[..], |_| {}).is_err(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(verify(&bytes[..], |_| {}).is_ok());
}

#[test]
fn records_of_another_image_are_refused() {
    let ours = image();
    let mut theirs = Vec::new();
    let mut writer = Writer::begin(&mut theirs, Identity([8; 16]), &machine()).expect("begun");
    for chunk in chunks() {
        writer.add(&chunk.compress(1).expect("compressed")).expect("added");
    }
    writer.commit().expect("committed");
    assert_eq!(ours.len(), theirs.len());
    for cut in [200, ours.len() / 2, ours.len() - 400] {
        let mixed = [&ours[..cut], &theirs[cut..]].concat();
        assert!(verify(&mixed[..], |_| {}).is_err(), "{cut}");
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = image();
    bytes[MAGIC.len()] = 9;
    assert!(matches!(verify(&bytes[..], |_| {}), Err(Error::Version(9))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// A stretch of an image is replaced, by accident or by an attacker: the image is refused, or
    /// still gives the same.
    #[test]
    fn replaced_stretches_are_refused(
        at in 0_usize..200_000,
        with in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut bytes = image();
        let at = at % bytes.len();
        let before = bytes.clone();
        let end = (at + with.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&with[..end - at]);
        let whole = verify(&bytes[..], |_| {}).is_ok();
        prop_assert_eq!(whole, bytes == before);
    }

    #[test]
    fn noise_is_no_image(noise in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let found = verify(&noise[..], |_| {});
        prop_assert!(found.is_err());
        let headed = [&image()[..20], &noise[..]].concat();
        let found = verify(&headed[..], |_| {});
        prop_assert!(found.is_err());
    }
}
