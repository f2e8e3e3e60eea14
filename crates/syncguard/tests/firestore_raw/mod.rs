//! A plain client of Firestore that bypasses the backend.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::HashMap;

use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
use syncguard::firestore::tonic::Status;
use syncguard::firestore::tonic::transport::{Channel, Endpoint};

use api::batch_get_documents_request::ConsistencySelector;
use api::batch_get_documents_response::Result as Found;
use api::firestore_client::FirestoreClient;
use api::run_query_request::{self, QueryType};
use api::structured_query::field_filter::Operator;
use api::structured_query::filter::FilterType;
use api::structured_query::{CollectionSelector, FieldFilter, FieldReference, Filter};
use api::transaction_options::{Mode, ReadWrite};
use api::value::ValueType;
use api::write::Operation;

pub(crate) type Fields = HashMap<String, api::Value>;

/// A client of the test database.
#[derive(Clone)]
pub(crate) struct Raw {
    client: FirestoreClient<Channel>,
}

const DATABASE: &str = "projects/test/databases/(default)";

/// Returns the full name of a document from its collection and id.
pub(crate) fn name(path: &str) -> String {
    format!("{DATABASE}/documents/{path}")
}

pub(crate) fn string(text: &str) -> api::Value {
    api::Value { value_type: Some(ValueType::StringValue(text.to_owned())) }
}

pub(crate) fn integer(number: i64) -> api::Value {
    api::Value { value_type: Some(ValueType::IntegerValue(number)) }
}

pub(crate) fn double(number: f64) -> api::Value {
    api::Value { value_type: Some(ValueType::DoubleValue(number)) }
}

/// A number as JavaScript may write it.
#[derive(Clone, Copy)]
pub(crate) enum Number {
    Integer(i64),
    Double(f64),
}

impl Number {
    pub(crate) fn value(self) -> api::Value {
        match self {
            Self::Integer(number) => integer(number),
            Self::Double(number) => double(number),
        }
    }
}

pub(crate) fn fields<const N: usize>(fields: [(&str, api::Value); N]) -> Fields {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

pub(crate) fn text_of(fields: &Fields, name: &str) -> String {
    match fields.get(name).and_then(|value| value.value_type.as_ref()) {
        Some(ValueType::StringValue(text)) => text.clone(),
        other => panic!("{name} is {other:?}"),
    }
}

pub(crate) fn number_of(fields: &Fields, name: &str) -> i64 {
    match fields.get(name).and_then(|value| value.value_type.as_ref()) {
        Some(ValueType::IntegerValue(number)) => *number,
        other => panic!("{name} is {other:?}"),
    }
}

/// Returns a write that replaces a document unconditionally.
pub(crate) fn set(path: &str, fields: Fields) -> api::Write {
    let document = api::Document { name: name(path), fields, ..Default::default() };
    api::Write { operation: Some(Operation::Update(document)), ..Default::default() }
}

pub(crate) fn delete(path: &str) -> api::Write {
    api::Write { operation: Some(Operation::Delete(name(path))), ..Default::default() }
}

impl Raw {
    pub(crate) fn new(port: u16) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"));
        let channel = endpoint.expect("an address").tcp_nodelay(true).connect_lazy();
        Self { client: FirestoreClient::new(channel) }
    }

    pub(crate) async fn get(&self, path: &str) -> Option<Fields> {
        let (mut found, _) = self.read(&[path], false).await.expect("works");
        found.remove(path)
    }

    pub(crate) async fn set(&self, path: &str, fields: Fields) {
        self.commit(vec![set(path, fields)], Vec::new()).await.expect("works");
    }

    pub(crate) async fn delete(&self, path: &str) {
        self.commit(vec![delete(path)], Vec::new()).await.expect("works");
    }

    /// Reads documents, in a new read-write transaction if `in_transaction` is set. Also returns
    /// the transaction.
    pub(crate) async fn read(
        &self,
        paths: &[&str],
        in_transaction: bool,
    ) -> Result<(HashMap<String, Fields>, Vec<u8>), Status> {
        let mode = Mode::ReadWrite(ReadWrite::default());
        let options = api::TransactionOptions { mode: Some(mode) };
        let selector = in_transaction.then_some(ConsistencySelector::NewTransaction(options));
        let request = api::BatchGetDocumentsRequest {
            database: DATABASE.to_owned(),
            documents: paths.iter().map(|path| name(path)).collect(),
            consistency_selector: selector,
            ..Default::default()
        };
        let mut answers = self.client.clone().batch_get_documents(request).await?.into_inner();
        let (mut found, mut transaction) = (HashMap::new(), Vec::new());
        while let Some(answer) = answers.message().await? {
            if !answer.transaction.is_empty() {
                transaction = answer.transaction;
            }
            if let Some(Found::Found(document)) = answer.result {
                let path = document.name.strip_prefix(&name("")).expect("ours").to_owned();
                found.insert(path, document.fields);
            }
        }
        Ok((found, transaction))
    }

    pub(crate) async fn commit(
        &self,
        writes: Vec<api::Write>,
        transaction: Vec<u8>,
    ) -> Result<(), Status> {
        let request = api::CommitRequest { database: DATABASE.to_owned(), writes, transaction };
        self.client.clone().commit(request).await.map(|_| ())
    }

    pub(crate) async fn rollback(&self, transaction: Vec<u8>) {
        let request = api::RollbackRequest { database: DATABASE.to_owned(), transaction };
        self.client.clone().rollback(request).await.expect("works");
    }

    /// Returns the locks with an id and the paths of their documents, in a new read-write
    /// transaction if `in_transaction` is set.
    pub(crate) async fn find(
        &self,
        lock_id: &str,
        in_transaction: bool,
    ) -> Result<(Vec<(String, Fields)>, Vec<u8>), Status> {
        let is_this = FieldFilter {
            field: Some(FieldReference { field_path: "lockId".to_owned() }),
            op: Operator::Equal.into(),
            value: Some(string(lock_id)),
        };
        let from = CollectionSelector { collection_id: "locks".to_owned(), all_descendants: false };
        let query = api::StructuredQuery {
            from: vec![from],
            r#where: Some(Filter { filter_type: Some(FilterType::FieldFilter(is_this)) }),
            ..Default::default()
        };
        let options = api::TransactionOptions { mode: Some(Mode::ReadWrite(ReadWrite::default())) };
        let request = api::RunQueryRequest {
            parent: format!("{DATABASE}/documents"),
            query_type: Some(QueryType::StructuredQuery(query)),
            consistency_selector: in_transaction
                .then_some(run_query_request::ConsistencySelector::NewTransaction(options)),
            ..Default::default()
        };
        let mut answers = self.client.clone().run_query(request).await?.into_inner();
        let (mut found, mut transaction) = (Vec::new(), Vec::new());
        while let Some(answer) = answers.message().await? {
            if !answer.transaction.is_empty() {
                transaction = answer.transaction;
            }
            found.extend(answer.document.map(|document| {
                let path = document.name.strip_prefix(&name("")).expect("ours").to_owned();
                (path, document.fields)
            }));
        }
        Ok((found, transaction))
    }
}
