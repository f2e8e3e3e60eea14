//! Asks several nodes which server is in charge. The best answer counts, not the first.

use std::future::Future;
use std::time::Duration;

use redis::{ConnectionInfo, ErrorKind, RedisResult};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::common::backoff::random_fraction;

/// The code of the error if nodes answered but none of them knows a server that can serve.
pub(super) const DOWN: &str = "CLUSTERDOWN";

/// One node's answer about who is in charge.
pub(super) struct NodeAnswer<T> {
    pub(super) found: T,
    /// Orders answers: a larger rank is more recent or more reliable.
    pub(super) rank: (u64, u64),
    /// Whether what was found can serve, according to this node.
    pub(super) is_usable: bool,
}

/// Asks all nodes and returns the answer of the highest rank.
///
/// * It begins with a random node, so that no node is always asked first, and asks a few at once;
///   the others follow one by one.
/// * It decides when more than half of the nodes have answered, or `node_timeout` after the first
///   usable answer: a node that does not answer costs at most this time, and an isolated node is
///   outvoted.
pub(super) async fn survey<T, F>(
    mut nodes: Vec<ConnectionInfo>,
    node_timeout: Duration,
    ask: impl Fn(ConnectionInfo) -> F,
) -> RedisResult<T>
where
    T: Send + 'static,
    F: Future<Output = RedisResult<NodeAnswer<T>>> + Send + 'static,
{
    const AT_ONCE: u32 = 5;
    const DELAY: Duration = Duration::from_millis(100);
    let count = nodes.len();
    nodes.rotate_left(random_place(count));
    let mut asked = JoinSet::new();
    for (node, place) in nodes.into_iter().zip(1_u32..) {
        let answer = ask(node);
        asked.spawn(async move {
            tokio::time::sleep(DELAY * place.saturating_sub(AT_ONCE)).await;
            answer.await
        });
    }
    let (mut best, mut failure) = (None::<NodeAnswer<T>>, None);
    let (mut answers, mut decide_at) = (0, None::<Instant>);
    loop {
        let decided = async {
            match decide_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let answer = tokio::select! {
            answer = asked.join_next() => answer,
            () = decided => break,
        };
        match answer {
            None => break,
            Some(Ok(Ok(answer))) => {
                answers += 1;
                if answer.is_usable {
                    decide_at.get_or_insert_with(|| Instant::now() + node_timeout);
                }
                if best.as_ref().is_none_or(|best| best.rank < answer.rank) {
                    best = Some(answer);
                }
            }
            Some(Ok(Err(cause))) => failure = Some(cause),
            Some(Err(_ended)) => {}
        }
        if answers > count / 2 && best.as_ref().is_some_and(|best| best.is_usable) {
            break;
        }
    }
    match (best, failure) {
        (Some(best), _) if best.is_usable => Ok(best.found),
        (None, Some(failure)) => Err(failure),
        (Some(_), _) => Err(redis::make_extension_error(DOWN.to_owned(), None)),
        (None, None) => Err((ErrorKind::InvalidClientConfig, "no node is configured").into()),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
#[expect(clippy::cast_precision_loss, reason = "a small count")]
fn random_place(count: usize) -> usize {
    ((random_fraction() * count as f64) as usize).min(count.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn node(port: u16) -> ConnectionInfo {
        format!("redis://host:{port}").into_connection_info().expect("a URL")
    }

    /// Node `n` answers after `n` times 20 ms with its entry: its rank and whether it is usable.
    async fn asked(table: &'static [Option<(u64, bool)>]) -> RedisResult<u16> {
        let nodes = (0..table.len()).map(|place| node(u16::try_from(place).expect("small")));
        let found = survey(nodes.collect(), Duration::from_millis(500), |node| async move {
            let redis::ConnectionAddr::Tcp(_, port) = *node.addr() else { unreachable!() };
            tokio::time::sleep(Duration::from_millis(20) * u32::from(port)).await;
            let Some((rank, is_usable)) = table[usize::from(port)] else {
                return std::future::pending().await;
            };
            Ok(NodeAnswer { found: node, rank: (rank, 0), is_usable })
        });
        let found = found.await?;
        match found.addr() {
            redis::ConnectionAddr::Tcp(_, port) => Ok(*port),
            _ => unreachable!(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_best_answer_of_a_majority_counts() {
        assert_eq!(asked(&[Some((1, true)), Some((2, true)), None]).await.expect("found"), 1);
        assert_eq!(asked(&[None, Some((1, true))]).await.expect("found"), 1);
        assert_eq!(
            asked(&[Some((1, false)), Some((1, false)), Some((2, true))]).await.ok(),
            Some(2)
        );
        let error = asked(&[Some((1, false)), Some((1, false))]).await.expect_err("no server");
        assert_eq!(error.code(), Some(DOWN));
        assert!(asked(&[]).await.is_err());
    }

    #[test]
    fn every_place_can_be_the_first() {
        let mut seen = [false; 3];
        for _ in 0..1000 {
            seen[random_place(3)] = true;
        }
        assert_eq!(seen, [true; 3]);
        assert_eq!(random_place(0), 0);
    }
}
