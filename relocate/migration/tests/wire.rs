//! A stream gives what was written, or is refused with the place of the damage.

use mercury_migration::{
    protocol::{Attempt, Digest, Message, Word},
    wire::{Content, Error, Frame, Ledger, PAGE, PAGES_MAX, Page, Pages, Reader, TEXT_MAX, Writer},
};
use proptest::prelude::*;

const ATTEMPT: Attempt = Attempt([7; 16]);
const GREETING: usize = 32;
const HEADER: usize = 32;

fn words() -> impl Strategy<Value = Word> {
    let plain = [
        Word::Offer,
        Word::Cancel,
        Word::Commit,
        Word::Accept,
        Word::Refuse,
        Word::Started,
        Word::Discarded,
        Word::Lost,
        Word::Unknown,
    ];
    prop_oneof![
        proptest::sample::select(plain.to_vec()),
        any::<[u8; 32]>().prop_map(|digest| Word::Final(Digest(digest))),
        any::<[u8; 32]>().prop_map(|digest| Word::Verified(Digest(digest))),
    ]
}

/// Returns a page: zeros, runs of the same byte, or noise.
fn page(seed: u8) -> [u8; PAGE] {
    let mut noise = u64::from(seed);
    std::array::from_fn(|at| match seed % 4 {
        0 => 0,
        1 => seed,
        2 => at as u8 ^ seed,
        _ => {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (noise >> 56) as u8
        }
    })
}

fn pages() -> impl Strategy<Value = Pages> {
    proptest::collection::vec((0..1_u64 << 40, any::<u8>()), 1..20).prop_map(|list| {
        let mut pages = Pages::default();
        list.into_iter().for_each(|(frame, seed)| pages.add(frame * PAGE as u64, &page(seed)));
        pages
    })
}

#[derive(Clone, Debug)]
enum Item {
    Say(Word, Vec<u8>),
    Round,
    Pages(Pages),
    Proof([u8; 32]),
}

fn items() -> impl Strategy<Value = Vec<Item>> {
    let text = proptest::collection::vec(any::<u8>(), 0..100);
    let item = prop_oneof![
        (words(), text).prop_map(|(word, text)| Item::Say(word, text)),
        Just(Item::Round),
        pages().prop_map(Item::Pages),
    ];
    let proof = any::<Option<[u8; 32]>>().prop_map(|proof| proof.map(Item::Proof));
    (proof, proptest::collection::vec(item, 0..8))
        .prop_map(|(proof, items)| proof.into_iter().chain(items).collect())
}

fn written(items: &[Item]) -> (Vec<u8>, Vec<Frame>) {
    let mut writer = Writer::begin(Vec::new(), ATTEMPT, 3).expect("begun");
    let mut round = 0;
    let frames = items.iter().map(|item| match item {
        Item::Say(word, text) => {
            writer.say(*word, text).expect("said");
            Frame::Message(Message { attempt: ATTEMPT, word: *word }, text.clone())
        }
        Item::Round => {
            writer.round(round).expect("begun");
            round += 1;
            Frame::Round(round - 1)
        }
        Item::Pages(pages) => {
            writer.pages(&pages.pack(1).expect("packed")).expect("written");
            Frame::Pages(pages.clone())
        }
        Item::Proof(proof) => {
            writer.prove(proof).expect("shown");
            Frame::Proof(*proof)
        }
    });
    let frames = frames.collect();
    (writer.into_inner(), frames)
}

fn read(bytes: &[u8]) -> (Vec<Frame>, Option<Error>) {
    let mut reader = match Reader::open(bytes).and_then(|reader| reader.expect(ATTEMPT, 3)) {
        Ok(reader) => reader,
        Err(error) => return (Vec::new(), Some(error)),
    };
    let mut frames = Vec::new();
    loop {
        match reader.next_frame() {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => return (frames, None),
            Err(error) => {
                assert!(reader.next_frame().is_err(), "it goes on after {error}");
                return (frames, Some(error));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reading_returns_the_written_frames(items in items()) {
        let (bytes, frames) = written(&items);
        let (found, error) = read(&bytes);
        prop_assert!(error.is_none(), "{error:?}");
        prop_assert_eq!(found, frames);
    }

    #[test]
    fn pages_are_what_they_were(list in proptest::collection::vec((0..1_u64 << 40, any::<u8>()), 1..40)) {
        let mut pages = Pages::default();
        list.iter().for_each(|(frame, seed)| pages.add(frame * PAGE as u64, &page(*seed)));
        for ((frame, seed), found) in list.iter().zip(pages.iter()) {
            let expected = page(*seed);
            let content = if seed % 4 == 0 { Content::Zero } else { Content::Data(&expected) };
            prop_assert_eq!(found, Page { phys: frame * PAGE as u64, content });
        }
        prop_assert_eq!(pages.iter().count(), list.len());
    }

    /// Any bit is flipped: the frames before it are right, and the error names the place.
    #[test]
    fn every_flip_is_refused(items in items(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let (mut bytes, frames) = written(&items);
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        let (found, error) = read(&bytes);
        prop_assert!(found.len() <= frames.len() && found == frames[..found.len()]);
        match error {
            None => prop_assert!(false, "byte {} was changed unseen", at),
            Some(Error::Damaged(place, _) | Error::Torn(place)) => {
                prop_assert!(at >= GREETING || found.is_empty());
                let begins = place.offset as usize;
                prop_assert!(at < GREETING || begins <= at, "byte {} was named as {}", at, place);
            }
            Some(_) => prop_assert!(at < GREETING),
        }
    }

    /// Bytes are taken out, put in, doubled and cut off.
    #[test]
    fn no_mixture_is_taken(items in items(), from in any::<prop::sample::Index>(),
                           to in any::<prop::sample::Index>(), length in 0..200_usize) {
        let (bytes, frames) = written(&items);
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let piece = &bytes[from..(from + length).min(bytes.len())];
        for mixed in [
            [&bytes[..to], piece, &bytes[to..]].concat(),
            [&bytes[..to], &bytes[(to + length).min(bytes.len())..]].concat(),
            [&bytes[..from], piece, piece].concat(),
        ] {
            let (found, _) = read(&mixed);
            prop_assert!(found.len() <= frames.len() && found == frames[..found.len()]);
        }
    }

    /// Frames with a right checksum and an arbitrary payload are parsed safely.
    #[test]
    fn no_payload_is_believed(kind in 1..7_u32, payload in proptest::collection::vec(any::<u8>(), 0..300)) {
        let (found, error) = read(&forged(kind, payload.len() as u32, &payload));
        prop_assert!(error.is_some() || found.len() == 1);
    }

    /// The same holds for payloads inside of compression.
    #[test]
    fn no_record_is_believed(length in any::<u32>(), raw in proptest::collection::vec(any::<u8>(), 0..300)) {
        for length in [length, raw.len() as u32] {
            let compressed = zstd::bulk::compress(&raw, 1).expect("packed");
            let packed = [&length.to_le_bytes()[..], &compressed].concat();
            let (found, error) = read(&forged(3, packed.len() as u32, &packed));
            prop_assert!(error.is_some() || found.len() == 1);
        }
    }
}

/// Makes a hostile stream of one frame: its checksum is right.
fn forged(kind: u32, length: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Writer::begin(Vec::new(), ATTEMPT, 3).expect("begun").into_inner();
    let header = [&kind.to_le_bytes()[..], &length.to_le_bytes(), &0_u64.to_le_bytes()].concat();
    let sum = blake3::hash(&[&bytes[..], &header, payload].concat());
    bytes.extend([&header[..], &sum.as_bytes()[..16], payload].concat());
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).1.expect("a refusal").to_string()
}

/// A length is refused before memory for it is allocated or bytes of it are read.
#[test]
fn lengths_are_limited() {
    for kind in 0..6 {
        let bytes = forged(kind, u32::MAX, &[]);
        let what = refusal(&bytes);
        assert!(what.starts_with("stream 3, frame 0 at byte 32: it is"), "{what}");
    }
    // Bombs: four gigabytes of zeros, and a record that is one byte too long.
    for length in [u32::MAX, 4 + 256 * (8 + 4096) + 1] {
        let mut packed = length.to_le_bytes().to_vec();
        packed.extend(zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("packed"));
        let what = refusal(&forged(3, packed.len() as u32, &packed));
        assert!(what.ends_with("longer than pages can be"), "{what}");
    }
    // More bytes come out than the length says.
    let mut packed = 4096_u32.to_le_bytes().to_vec();
    packed.extend(zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("packed"));
    let what = refusal(&forged(3, packed.len() as u32, &packed));
    assert!(what.ends_with("cannot be decompressed"), "{what}");
    let mut writer = Writer::begin(Vec::new(), ATTEMPT, 3).expect("begun");
    assert!(writer.say(Word::Offer, &vec![0; TEXT_MAX + 1]).is_err());
}

/// A record refers to the page before it, and there is none.
#[test]
fn the_first_page_is_like_no_other() {
    let raw = [&1_u32.to_le_bytes()[..], &0x1003_u64.to_le_bytes()].concat();
    let packed =
        [&(raw.len() as u32).to_le_bytes()[..], &zstd::bulk::compress(&raw, 1).expect("packed")].concat();
    assert!(refusal(&forged(3, packed.len() as u32, &packed)).ends_with("one of its entries is invalid"));
}

#[test]
fn truncations_are_torn() {
    let items = [Item::Round, Item::Say(Word::Commit, b"text".to_vec())];
    let (bytes, frames) = written(&items);
    for length in 0..bytes.len() {
        let (found, error) = read(&bytes[..length]);
        assert_eq!(found, frames[..found.len()]);
        let ends = [GREETING, GREETING + HEADER + 8];
        match error {
            None => assert!(ends.contains(&length)),
            Some(Error::NotAStream) => assert!(length < GREETING),
            Some(Error::Torn(place)) => {
                assert!(place.offset as usize <= length && found.len() as u64 == place.frame)
            }
            Some(error) => panic!("{error} at {length}"),
        }
    }
}

/// Frames of one stream are refused in another stream, in another attempt, and twice in the same
/// one.
#[test]
fn frames_are_of_one_place() {
    let (bytes, _) = written(&[Item::Say(Word::Commit, Vec::new())]);
    let frame = &bytes[GREETING..];
    for (attempt, stream) in [(Attempt([8; 16]), 3), (ATTEMPT, 4)] {
        let mut other = Writer::begin(Vec::new(), attempt, stream).expect("begun").into_inner();
        assert!(matches!(Reader::open(&other[..]).expect("a stream").expect(ATTEMPT, 3), Err(Error::Other)));
        other.extend_from_slice(frame);
        let what = Reader::open(&other[..]).expect("a stream").next_frame().expect_err("taken").to_string();
        assert!(what.ends_with("checksum is wrong"), "{what}");
    }
    let what = refusal(&[&bytes[..], frame].concat());
    assert_eq!(what, "stream 3, frame 1 at byte 97: it does not belong at this place of the stream");
}

/// A proof is shown once, as the first frame, and never on stream 0.
#[test]
fn proofs_have_their_place() {
    let prove = |stream, first: bool| {
        let mut writer = Writer::begin(Vec::new(), ATTEMPT, stream).expect("begun");
        if !first {
            writer.round(0).expect("written");
        }
        writer.prove(&[5; 32]).expect("shown");
        let bytes = writer.into_inner();
        let mut reader = Reader::open(&bytes[..]).expect("a stream");
        assert_eq!(reader.stream(), stream);
        if !first {
            reader.next_frame().expect("a round");
        }
        reader.next_frame().map_err(|error| error.to_string())
    };
    assert_eq!(prove(1, true), Ok(Some(Frame::Proof([5; 32]))));
    for (stream, first) in [(0, true), (1, false)] {
        assert!(
            prove(stream, first)
                .expect_err("taken")
                .ends_with("a proof does not belong at this place of the stream")
        );
    }
}

#[test]
fn rounds_follow_each_other() {
    let mut writer = Writer::begin(Vec::new(), ATTEMPT, 3).expect("begun");
    writer.round(0).expect("written");
    writer.round(2).expect("written");
    assert!(refusal(&writer.into_inner()).ends_with("frame 1 at byte 72: it is not the next round"));
}

#[test]
fn versions_are_named() {
    let (mut bytes, _) = written(&[]);
    bytes[8] = 9;
    assert_eq!(refusal(&bytes), "the other end speaks version 9; this one speaks 4");
}

/// The digest covers the last version of each page, and its address. Earlier versions do not
/// matter.
#[test]
fn the_digest_is_of_what_is_there_at_the_end() {
    let ranges = vec![0x1000..0x5000, 0x10_0000..0x20_0000];
    let (one, two) = (page(1), page(2));
    let ledger = |list: &[(u64, &[u8; PAGE])]| {
        let mut ledger = Ledger::new(ranges.clone());
        for (phys, bytes) in list {
            ledger.note(Page { phys: *phys, content: Content::Data(bytes) }).expect("noted");
        }
        ledger.digest(ATTEMPT)
    };
    let digest = ledger(&[(0x1000, &one), (0x2000, &two)]);
    assert_eq!(ledger(&[(0x2000, &one), (0x1000, &one), (0x2000, &two)]), digest);
    assert_ne!(ledger(&[(0x1000, &two), (0x2000, &one)]), digest);
    assert_ne!(ledger(&[(0x1000, &one), (0x2000, &two), (0x3000, &two)]), digest);
    assert_ne!(ledger(&[(0x1000, &one), (0x3000, &two)]), digest);
    let mut other = Ledger::new(ranges.clone());
    for phys in [0, 0x5000, 0x20_0000, u64::MAX - 0xfff] {
        assert!(other.note(Page { phys, content: Content::Zero }).is_err(), "{phys:#x} was taken");
    }
    assert!(other.is_empty() && !other.has(0x1000));
    other.note(Page { phys: 0x4000, content: Content::Zero }).expect("noted");
    let mut zeros = Ledger::new(ranges);
    zeros.note(Page { phys: 0x4000, content: Content::Data(&[0; PAGE]) }).expect("noted");
    assert_eq!(zeros.digest(ATTEMPT), other.digest(ATTEMPT));
    assert_ne!(zeros.digest(ATTEMPT), other.digest(Attempt([8; 16])));
}

/// A page that was hashed once is not hashed again, and the time of the hashing makes no
/// difference.
#[test]
fn the_digest_takes_as_long_as_what_has_changed() {
    const REGION: u64 = 2 << 20;
    // One range ends within a region, one has no page, and one begins within a region.
    let mut ledger = Ledger::new(vec![0x1000..0x30_0000, 0x40_0000..0x40_0000, 0x100_0000..0x4100_0000]);
    let all = (0x1000..0x30_0000).chain(0x100_0000..0x4100_0000).step_by(PAGE);
    let regions = all.clone().count().div_ceil(512);
    for phys in all {
        ledger.note(Page { phys, content: Content::Data(&page((phys >> 12) as u8)) }).expect("noted");
    }
    let mut late = ledger.clone();
    assert_eq!(ledger.settle(), regions);
    let digest = ledger.digest(ATTEMPT);
    assert_eq!((ledger.settle(), late.digest(ATTEMPT)), (0, digest));
    for phys in [0x100_0000, 0x100_0000 + 7 * REGION] {
        let same = page((phys >> 12) as u8);
        assert_eq!(ledger.note(Page { phys, content: Content::Data(&same) }), Ok(false));
    }
    assert_eq!(ledger.settle(), 0, "what is the same makes nothing stale");
    for phys in [0x100_0000, 0x100_0000 + 7 * REGION] {
        for ledger in [&mut ledger, &mut late] {
            assert_eq!(ledger.note(Page { phys, content: Content::Data(&page(201)) }), Ok(true));
        }
    }
    assert_ne!(late.digest(ATTEMPT), digest);
    assert_eq!((ledger.settle(), ledger.digest(ATTEMPT)), (2, late.digest(ATTEMPT)));
}

#[test]
fn a_full_record_goes_through() {
    let mut pages = Pages::default();
    for number in 0..PAGES_MAX as u64 {
        assert!(!pages.is_full());
        pages.add(number * 4096, &page((number % 64) as u8 * 4 + 3));
    }
    assert!(pages.is_full());
    let (bytes, frames) = written(&[Item::Pages(pages)]);
    assert_eq!(read(&bytes).0, frames);
}
