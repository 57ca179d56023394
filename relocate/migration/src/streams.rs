//! Several streams of one attempt. Stream 0 is the connection that carries all messages. The others
//! carry pages alone, each by a connection of its own.
//!
//! A page always goes by the same stream, which its address determines ([`stream_of`]). A later
//! version of a page therefore arrives later. Streams need no other order among them. Each stream
//! ends with the word that ends the pages on stream 0, the digest of everything. The destination
//! compares nothing before that word has come on each stream.
//!
//! The opener of a further stream has the pairing token, as the opener of the first. The token is
//! not enough. The opener shows a [`Proof`] that it has the secret that went with the offer inside
//! of the first stream. The proof is for this stream of this attempt, and for the session that
//! carries it. So a peer that has only seen the token cannot add a stream, and a message of another
//! session is worth nothing.

use crate::{announcement::Secret, protocol::Attempt};

/// Largest number of streams.
pub const STREAMS_MAX: u32 = 16;
/// Size of a stripe in bytes, 128 KiB. Neighbours in a stripe go by the same stream, so that they
/// are read and packed together.
pub const STRIPE: u64 = 128 << 10;

/// Context for deriving a proof.
const CONTEXT: &str = "mercury migration 3: another stream of an attempt";

/// Returns the stream of a page, of so many.
#[must_use]
pub fn stream_of(phys: u64, streams: u32) -> u32 {
    // The result is less than `streams`, which is 32 bits long.
    (phys / STRIPE % u64::from(streams.max(1))) as u32
}

/// The proof that the opener of a stream shows.
pub type Proof = [u8; 32];

/// Returns the proof for a stream of an attempt with this secret, in the session of `binding`. Only
/// the two ends of a TLS session can derive `binding` (RFC 8446, 7.5).
#[must_use]
pub fn proof(secret: &Secret, attempt: Attempt, stream: u32, binding: &[u8; 32]) -> Proof {
    let key = blake3::derive_key(CONTEXT, &[&secret[..], &attempt.0].concat());
    *blake3::keyed_hash(&key, &[&stream.to_le_bytes()[..], binding].concat()).as_bytes()
}

/// Returns true if the shown proof is right. The comparison takes constant time.
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
