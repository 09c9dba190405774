import io.confluent.kafka.schemaregistry.avro.AvroSchema;
import io.confluent.kafka.schemaregistry.client.CachedSchemaRegistryClient;
import io.confluent.kafka.schemaregistry.client.rest.exceptions.RestClientException;
import io.confluent.kafka.serializers.KafkaAvroDeserializer;
import io.confluent.kafka.serializers.KafkaAvroSerializer;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.common.errors.SerializationException;

/**
 * Confluent's Avro serializers and their registry client, unchanged: each line that it prints is one result.
 *
 * Arguments: the URLs of the registry's nodes. A value is written through the first one and read through the last one.
 */
public class AvroSerializers {
    static final Schema FIRST = new Schema.Parser().parse(
        "{\"type\":\"record\",\"name\":\"Order\",\"namespace\":\"shop\",\"fields\":["
            + "{\"name\":\"id\",\"type\":\"long\"},{\"name\":\"who\",\"type\":{\"type\":\"string\",\"avro.java.string\":\"String\"}}]}");
    static final Schema SECOND = new Schema.Parser().parse(
        "{\"type\":\"record\",\"name\":\"Order\",\"namespace\":\"shop\",\"fields\":["
            + "{\"name\":\"id\",\"type\":\"long\"},{\"name\":\"who\",\"type\":\"string\"},"
            + "{\"name\":\"note\",\"type\":[\"null\",\"string\"],\"default\":null}]}");
    static final Schema BROKEN = new Schema.Parser().parse(
        "{\"type\":\"record\",\"name\":\"Order\",\"namespace\":\"shop\",\"fields\":["
            + "{\"name\":\"id\",\"type\":\"string\"}]}");

    public static void main(String[] urls) throws Exception {
        String first = urls[0], last = urls[urls.length - 1];
        byte[] old, extended, normal;
        try (KafkaAvroSerializer serializer = new KafkaAvroSerializer()) {
            serializer.configure(Map.of("schema.registry.url", first), false);
            old = serializer.serialize("orders", order(FIRST));
            extended = serializer.serialize("orders", order(SECOND));
            try {
                serializer.serialize("orders", order(BROKEN));
                System.out.println("accepted an incompatible schema");
            } catch (SerializationException refused) {
                RestClientException cause = (RestClientException) refused.getCause();
                System.out.println("incompatible " + cause.getStatus() + " " + cause.getErrorCode());
            }
        }
        try (KafkaAvroSerializer serializer = new KafkaAvroSerializer()) {
            serializer.configure(
                Map.of("schema.registry.url", last, "auto.register.schemas", "false", "use.latest.version", "true",
                    "normalize.schemas", "true"), false);
            normal = serializer.serialize("orders", order(SECOND));
        }
        System.out.println("value " + HexFormat.of().formatHex(old));
        System.out.println("same " + Arrays.equals(extended, normal));
        try (KafkaAvroDeserializer deserializer = new KafkaAvroDeserializer()) {
            deserializer.configure(Map.of("schema.registry.url", last), false);
            System.out.println("read " + deserializer.deserialize("orders", old));
            System.out.println("read " + deserializer.deserialize("orders", extended));
        }
        CachedSchemaRegistryClient client = new CachedSchemaRegistryClient(List.of(urls), 10);
        System.out.println("subjects " + client.getAllSubjects());
        System.out.println("versions " + client.getAllVersions("orders-value"));
        System.out.println("latest " + client.getLatestSchemaMetadata("orders-value").getVersion());
        System.out.println("level " + client.updateCompatibility("orders-value", "NONE"));
        System.out.println("compatible " + client.testCompatibility("orders-value", new AvroSchema(BROKEN)));
        System.out.println("deleted " + client.deleteSubject("orders-value"));
        try {
            client.getLatestSchemaMetadata("orders-value");
        } catch (RestClientException missing) {
            System.out.println("missing " + missing.getStatus() + " " + missing.getErrorCode());
        }
    }

    static GenericRecord order(Schema schema) {
        GenericRecord order = new GenericData.Record(schema);
        if (schema == BROKEN) {
            order.put("id", "x");
            return order;
        }
        order.put("id", 7L);
        order.put("who", "Ada");
        return order;
    }
}
