//! Several streams of one attempt. The first, stream 0, is the connection that everything is said by; the others carry pages
//! alone, each by a connection of its own.
//!
//! A page always goes by the same stream, which its address tells ([`stream_of`]): so what was sent of it later comes later.
//! Streams need no order among them otherwise. Each ends with the word that stream 0 ends the pages with, the digest of all;
//! the destination looks at nothing before it has come by each.
//!
//! Who opens another stream has the line, as whoever opens the first. That is not enough: it shows ([`Proof`]) that it has
//! what went with the offer inside of the first one, for this stream of this attempt, and for the session that it says it in.
//! So nobody who has only seen the line adds a stream, and what was said in another session is worth nothing.

use crate::{hail::Secret, protocol::Attempt};

/// So many at most.
pub const STREAMS_MAX: u32 = 16;
/// Neighbours go by the same stream, so that they are read and packed together: 128 KiB.
pub const STRIPE: u64 = 128 << 10;

/// What a proof is derived with.
const CONTEXT: &str = "mercury migration 3: another stream of an attempt";

/// The stream that a page goes by, of so many.
#[must_use]
pub fn stream_of(phys: u64, streams: u32) -> u32 {
    // Less than `streams`, which is 32 bits long.
    (phys / STRIPE % u64::from(streams.max(1))) as u32
}

/// What whoever opens a stream shows.
pub type Proof = [u8; 32];

/// That of a stream of an attempt with this secret, in the session that `binding` is made of: what both ends of a TLS session,
/// and nobody else, can derive from it (RFC 8446, 7.5).
#[must_use]
pub fn proof(secret: &Secret, attempt: Attempt, stream: u32, binding: &[u8; 32]) -> Proof {
    let key = blake3::derive_key(CONTEXT, &[&secret[..], &attempt.0].concat());
    *blake3::keyed_hash(&key, &[&stream.to_le_bytes()[..], binding].concat()).as_bytes()
}

/// Whether it is that. How long this takes says nothing of what would have been right.
#[must_use]
pub fn is_proof(shown: &Proof, right: &Proof) -> bool {
    blake3::Hash::from_bytes(*shown) == blake3::Hash::from_bytes(*right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_one_stream() {
        for streams in 1..=STREAMS_MAX {
            let of: Vec<_> = (0..64).map(|stripe| stream_of(stripe * STRIPE, streams)).collect();
            assert!(of.iter().all(|stream| *stream < streams));
            assert!((0..streams).all(|stream| of.contains(&stream)), "{streams}: one has nothing to do");
            assert_eq!(stream_of(5 * STRIPE, streams), stream_of(6 * STRIPE - 4096, streams));
        }
        assert_eq!(stream_of(u64::MAX, 0), 0);
    }

    #[test]
    fn a_proof_is_of_one_stream_in_one_session_of_one_attempt() {
        let right = proof(&[1; 32], Attempt([2; 16]), 3, &[4; 32]);
        assert!(is_proof(&right, &proof(&[1; 32], Attempt([2; 16]), 3, &[4; 32])));
        let others = [
            proof(&[0; 32], Attempt([2; 16]), 3, &[4; 32]),
            proof(&[1; 32], Attempt([0; 16]), 3, &[4; 32]),
            proof(&[1; 32], Attempt([2; 16]), 0, &[4; 32]),
            proof(&[1; 32], Attempt([2; 16]), 3, &[0; 32]),
        ];
        assert!(others.iter().all(|other| !is_proof(other, &right)));
    }
}
