//! The check of the other end against the pairing token. Each certificate is its own authority, and
//! the pin decides if it is the right one. rustls checks that the certificate is well formed and in
//! time, and that the other end holds its key.

use std::sync::Arc;

use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

use super::{MachineName, PairingToken};

/// First bytes of a public key (RFC 8410, 4); the key's 32 bytes follow.
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

fn stranger() -> Error {
    Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
}

/// Returns the error for TLS 1.2, which is not spoken.
fn too_old() -> Error {
    Error::General("TLS 1.2 is not spoken".into())
}

fn alone(
    certificate: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<Arc<RootCertStore>, Error> {
    if !intermediates.is_empty() {
        return Err(stranger());
    }
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone().into_owned())?;
    Ok(Arc::new(roots))
}

/// The methods by which both checks verify signatures: of TLS 1.3, with Ed25519.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(too_old())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }
    };
}

fn public_key(key: &[u8]) -> Vec<u8> {
    [&SPKI[..], key].concat()
}

/// A receiver that is meant.
#[derive(Debug)]
pub enum Pin {
    /// The one that has printed the token.
    Token(PairingToken),
    /// The machine of this name.
    Machine(MachineName),
}

impl Pin {
    fn is_of(&self, certificate: &CertificateDer<'_>) -> Result<bool, Error> {
        Ok(match self {
            Self::Token(token) => token.is_pinned(certificate),
            Self::Machine(name) => {
                let key = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
                key.as_ref() == public_key(name.key())
            }
        })
    }
}

/// The sender's check of the receiver.
#[derive(Debug)]
pub struct PinnedReceiver {
    pin: Pin,
    provider: Arc<CryptoProvider>,
}

impl PinnedReceiver {
    pub fn new(pin: Pin, provider: Arc<CryptoProvider>) -> Self {
        Self { pin, provider }
    }
}

impl ServerCertVerifier for PinnedReceiver {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if !self.pin.is_of(end_entity)? {
            return Err(stranger());
        }
        let roots = alone(end_entity, intermediates)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    signatures!();
}

/// The receiver's check of the sender.
#[derive(Debug)]
pub struct PinnedSender {
    /// Public keys that are accepted: that of the token's secret, or those of known machines.
    keys: Vec<Vec<u8>>,
    provider: Arc<CryptoProvider>,
}

impl PinnedSender {
    pub fn new(token: &PairingToken, provider: Arc<CryptoProvider>) -> Result<Self, super::Error> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&token.sender_seed()).map_err(super::local)?;
        Ok(Self { keys: vec![public_key(pair.public_key().as_ref())], provider })
    }

    /// Accepts machines of these names.
    pub fn known(names: &[MachineName], provider: Arc<CryptoProvider>) -> Self {
        Self { keys: names.iter().map(|name| public_key(name.key())).collect(), provider }
    }
}

impl ClientCertVerifier for PinnedSender {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let key = ParsedCertificate::try_from(end_entity)?.subject_public_key_info();
        if !self.keys.iter().any(|known| key.as_ref() == known) {
            return Err(stranger());
        }
        let roots = alone(end_entity, intermediates)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_client_cert(end_entity, &[], now)
    }

    signatures!();
}
