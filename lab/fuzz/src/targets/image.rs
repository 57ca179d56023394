//! Images of machines: a single one, a parent, and a chain.
//!
//! The records of an input ([`crate::input`]) are those of an image; the target makes their headers and
//! the numbers of the commit record. A record of kind 0 begins the next image of a chain. An input that
//! begins with the byte 255 is raw bytes.

use crate::{
    Target,
    input::{COMPRESSED, OUT_OF_ORDER, Record, WRONG_SUM, outcome, record, records},
};
use mercury_image::{
    Chain, Identity, Kind, MAGIC, Machine, Merged, PAGE, Parent, Range, Reader, VERSION, verify,
};
use std::io::Cursor;

const RAW: u8 = 255;
const MACHINE: u8 = 1;
const FRAMES: u8 = 2;
const COMMIT: u8 = 3;
const HASHES: u8 = 4;
const KEY: [u8; 32] = [5; 32];
/// Physical addresses of the machine's frames.
const FRAMES_PHYS: [u64; 3] = [0x1000, 0x2000, 0x3000];

pub const TARGET: Target = Target { name: "image", run, seeds };

/// Returns a full image and one that is made on it, and raw bytes.
fn seeds() -> Vec<Vec<u8>> {
    let full = [
        record(MACHINE, 0, &machine(Vec::new())),
        record(FRAMES, COMPRESSED, &frames(&[(0x1000, 1), (0x2000, 2), (0x3000, 0x1000)], &[&[0xA5; PAGE]])),
        record(HASHES, COMPRESSED, &hashes(&[&[0xA5; PAGE], &[0; PAGE], &[0xA5; PAGE]])),
        record(COMMIT, 0, &[]),
    ]
    .concat();
    let next = [
        record(0, 0, &[]),
        record(MACHINE, 0, &machine(vec![Identity([0; 16])])),
        record(FRAMES, COMPRESSED, &frames(&[(0x1000, 2 << 12 | 3), (0x3000, 1)], &[&[7; PAGE]])),
        record(HASHES, COMPRESSED, &hashes(&[&[0xA5; PAGE], &[0; PAGE], &[7; PAGE]])),
        record(COMMIT, 0, &[]),
    ]
    .concat();
    let raw = [&[RAW], &forged(0, &records(&full))[..]].concat();
    vec![full.clone(), [full, next].concat(), raw]
}

fn machine(parents: Vec<Identity>) -> Vec<u8> {
    let ranges = vec![Range { start_phys: FRAMES_PHYS[0], pages: 3, kind: Kind::Kept }];
    serde_json::to_vec(&Machine { ranges, parents, ..Machine::default() }).expect("JSON")
}

fn frames(entries: &[(u64, u64)], data: &[&[u8; PAGE]]) -> Vec<u8> {
    let mut bytes = (entries.len() as u64).to_le_bytes().to_vec();
    entries
        .iter()
        .for_each(|(phys, source)| bytes.extend([phys.to_le_bytes(), source.to_le_bytes()].concat()));
    data.iter().for_each(|page| bytes.extend_from_slice(*page));
    bytes
}

fn hashes(pages: &[&[u8; PAGE]]) -> Vec<u8> {
    let run = [1_u64, FRAMES_PHYS[0], pages.len() as u64].map(u64::to_le_bytes).concat();
    let mut bytes = [&KEY[..], &run].concat();
    for page in pages {
        let hash = blake3::keyed_hash(&KEY, *page);
        bytes.extend(if page.iter().all(|byte| *byte == 0) {
            [0; 16]
        } else {
            hash.as_bytes()[..16].try_into().expect("16 bytes")
        });
    }
    bytes
}

/// Makes an image with right checksums.
fn forged(identity: u8, records: &[Record]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    let mut sums = blake3::Hasher::new();
    let (mut frames, mut unchanged) = (0_u64, 0_u64);
    for (number, record) in records.iter().enumerate() {
        let mut raw = record.payload.clone();
        if record.kind == COMMIT && raw.is_empty() {
            let sum = sums.finalize();
            raw = format!(
                "{{\"records\":{number},\"frames\":{frames},\"zeros\":0,\"duplicates\":0,\
                 \"unchanged\":{unchanged},\"checksum\":\"{sum}\"}}"
            )
            .into_bytes();
        }
        if record.kind == FRAMES {
            let counted = count(&raw);
            (frames, unchanged) = (frames.saturating_add(counted.0), unchanged.saturating_add(counted.1));
        }
        let length = raw.len() as u64;
        let payload = match record.has(COMPRESSED) {
            true => zstd::bulk::compress(&raw, 1).expect("compressed"),
            false => raw,
        };
        let number = number as u64 + u64::from(record.has(OUT_OF_ORDER));
        let mut header = b"MREC".to_vec();
        header.extend(u32::from(record.kind).to_le_bytes());
        header.extend(number.to_le_bytes());
        header.extend([identity; 16]);
        header.extend([payload.len() as u64, length].map(u64::to_le_bytes).concat());
        let mut sum = *blake3::hash(&[&header[..], &payload].concat()).as_bytes();
        sum[0] ^= u8::from(record.has(WRONG_SUM));
        sums.update(&sum);
        bytes.extend([&header[..], &sum, &payload].concat());
    }
    bytes
}

/// Counts the frames of a record, and those that are unchanged since the parent.
fn count(raw: &[u8]) -> (u64, u64) {
    let word =
        |at: usize| raw.get(at..at + 8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
    let entries = word(0).unwrap_or(0).min(4096) as usize;
    let sources = (0..entries).filter_map(|entry| word(16 + entry * 16));
    sources.fold((0, 0), |(frames, unchanged), source| match source & 0xFFF {
        3 => (frames + (source >> 12), unchanged + (source >> 12)),
        _ => (frames + 1, unchanged),
    })
}

fn run(input: &[u8]) -> u64 {
    let images: Vec<Vec<u8>> = match input.split_first() {
        Some((&RAW, raw)) => vec![raw.to_vec()],
        _ => {
            let all = records(input);
            let parts = all.split(|record| record.kind == 0).take(4).enumerate();
            parts.map(|(number, records)| forged(number as u8, records)).collect()
        }
    };
    let mut text = String::new();
    for image in &images {
        text += &match verify(&image[..], |_| {}) {
            Ok(_) => "whole".to_owned(),
            Err(error) => error.to_string(),
        };
        text += &parts(image);
        text += &parent(image);
    }
    text += &match merged(&images) {
        Ok(frames) => format!("{} merged", "x".repeat(frames.min(9))),
        Err(error) => error.to_string(),
    };
    outcome(&text)
}

/// Reads an image part by part.
fn parts(image: &[u8]) -> String {
    let Ok(mut reader) = Reader::open(image) else { return String::new() };
    let mut found = 0;
    while let Ok(Some(_)) = reader.next_part() {
        found += 1;
    }
    if let Ok(mut reader) = Reader::open(image) {
        while let Ok(Some(chunk)) = reader.next_chunk() {
            assert!(chunk.frames.len() <= 4096, "a chunk with more frames than it may have");
        }
    }
    "p".repeat(found.min(9))
}

fn parent(image: &[u8]) -> String {
    let mut parent = match Parent::open(Cursor::new(image)) {
        Ok(parent) => parent,
        Err(error) => return error.to_string(),
    };
    let _ = parent.lineage();
    let found = FRAMES_PHYS.map(|phys| parent.hash_of(phys).map(|hash| hash.is_some()).map_err(|_| ()));
    format!("{found:?}")
}

/// Merges a chain, and returns the number of its frames. Each has the hash of the last image.
fn merged(images: &[Vec<u8>]) -> mercury_image::Result<usize> {
    let mut chain = Chain::default();
    for image in images {
        chain.begin(Cursor::new(&image[..]))?;
        while chain.step()? {}
    }
    let mut merged: Merged<_> = chain.merged()?;
    let (key, mut found) = (merged.key(), 0);
    while let Some(hashes) = merged.next_frames()? {
        for (phys, hash) in hashes.iter() {
            // A frame of zeros has no content to find.
            if hash == [0; 16] {
                found += 1;
                continue;
            }
            let mut page = Vec::new();
            merged.find(phys, hash, &mut page)?;
            assert!(page.len() == PAGE && key.hash(&page) == hash, "frame {phys:#x} is wrong");
            found += 1;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seeds must be accepted to the end, so that mutations begin behind all checks.
    #[test]
    fn seeds_are_whole() {
        let seeds = seeds();
        let full = forged(0, &records(&seeds[0]));
        verify(&full[..], |_| {}).expect("a whole image");
        let all = records(&seeds[1]);
        let images = all.split(|record| record.kind == 0).enumerate();
        let images: Vec<_> = images.map(|(number, records)| forged(number as u8, records)).collect();
        assert_eq!(merged(&images).expect("a chain"), 3);
    }
}
